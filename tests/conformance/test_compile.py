"""The operator under torch's own checks, and modules inside compiled and exported graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance.backends import collection, device_of, every_backend, refusal
from torch import Tensor, nn

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.launch.kernels import Program
from embforge.operators import lookup as ops
from embforge.verify.cases import Case, draw_batch

SPEC = CollectionSpec(
    [TableSpec("a", 100, 7), TableSpec("b", 50, 16, "bf16")],
    [FeatureSpec("x", "a"), FeatureSpec("y", "b", "mean", weighted=True)],
)
WITH_ROWS = CollectionSpec(SPEC.tables, [*SPEC.features, FeatureSpec("s", "a", "none")])


def batch(
    spec: CollectionSpec, size: int = 6, seed: int = 0, backend: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None]:
    return draw_batch(spec, Case(size), seed, device_of(backend))


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():  # sparse gradients break graphs; training is tested in test_training_graphs.py
        yield


@every_backend
@pytest.mark.parametrize("weighted", [True, False])
def test_the_operator_passes_opcheck(backend: Any, weighted: bool) -> None:
    module = collection(WITH_ROWS, backend)
    values, offsets, weights = batch(WITH_ROWS, backend=backend)
    tables = [module.weight(t.name).detach() for t in WITH_ROWS.tables]
    rows = [int(offsets[18] - offsets[12])]
    arguments = (values, offsets, weights if weighted else None, tables, rows, Program(module.plan()).text, "error")
    torch.library.opcheck(ops.lookup, arguments)


@every_backend
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_lookup_compiles_without_graph_breaks(backend: Any, compiler: str) -> None:
    """A compiled lookup is right for batches of other sizes, and raises errors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = collection(SPEC, backend)

        def forward(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
            return self.embeddings(values, offsets, weights).relu() * 2

    model = Model()
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    for size in (6, 9, 1, 17):
        arguments = batch(SPEC, size, size, backend)
        assert torch.equal(compiled(*arguments), model(*arguments))
    values, offsets, weights = batch(SPEC, backend=backend)
    with refusal(model.embeddings, IndexError, "feature 'x': id 100"):
        compiled(torch.full_like(values, 100), offsets, weights)


def test_two_lookups_of_the_same_ids_in_one_graph_are_right() -> None:
    module = EmbeddingCollection(SPEC, backend="cpu")
    arguments = batch(SPEC)

    def twice(*arguments: Any) -> Tensor:
        return module(*arguments) + module(*arguments)

    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(*arguments), twice(*arguments))


def test_a_compiled_module_sees_changed_rows() -> None:
    module = EmbeddingCollection(SPEC, backend="cpu")
    compiled = torch.compile(module, backend="inductor", fullgraph=True)
    before = compiled(*batch(SPEC))
    with torch.no_grad():
        module.weight("a").mul_(2)
    assert torch.equal(compiled(*batch(SPEC))[:, :7], before[:, :7] * 2)


def test_compiled_sequence_features_are_right() -> None:
    """Their sizes depend on the numbers in offsets, so that the graph may break, but the result must be right."""
    module = EmbeddingCollection(WITH_ROWS, backend="cpu")
    compiled = torch.compile(module.forward_dict, backend="eager")
    for size in (6, 3):
        want, have = module.forward_dict(*batch(WITH_ROWS, size)), compiled(*batch(WITH_ROWS, size))
        assert all(torch.equal(want[name], have[name]) for name in want)


def test_an_exported_module_gives_the_same_results() -> None:
    module = EmbeddingCollection(SPEC, backend="cpu")
    exported = torch.export.export(module, batch(SPEC))
    assert torch.equal(exported.module()(*batch(SPEC)), module(*batch(SPEC)))


def test_profiler_sees_the_operator() -> None:
    module = EmbeddingCollection(SPEC, backend="cpu")
    with torch.profiler.profile() as profile:
        module(*batch(SPEC))
    assert any(event.key == "embforge::lookup" for event in profile.key_averages())


def test_inference_and_no_grad_modes_change_no_result() -> None:
    module = EmbeddingCollection(SPEC, backend="cpu")
    want = module(*batch(SPEC))
    with torch.inference_mode():
        assert torch.equal(module(*batch(SPEC)), want)
    with torch.no_grad():
        assert torch.equal(module(*batch(SPEC)), want)


@pytest.mark.parametrize("backend", ["reference", "cpu", "simt"])
def test_wrong_sequence_sizes_are_refused(backend: Any) -> None:
    """A direct call of the operator must not write past what it allocated.

    On a GPU offsets are not looked at before a launch: its kernel leaves out what does not fit.
    """
    module = collection(WITH_ROWS, backend)
    values, offsets, weights = batch(WITH_ROWS, backend=backend)
    tables = [module.weight(t.name).detach() for t in WITH_ROWS.tables]
    rows = int(offsets[18] - offsets[12])
    for wrong in ([rows - 1], [rows + 1], [0]):
        with pytest.raises(ValueError, match="sequence_rows"):
            ops.lookup(values, offsets, weights, tables, wrong, Program(module.plan()).text, "error")
