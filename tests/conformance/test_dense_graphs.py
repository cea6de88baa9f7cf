"""Dense gradients where torch changes or checks graphs: torch.compile, the profiler, meta tensors, opcheck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance.backends import every_backend
from conformance.training import SPEC, WITH_ROWS, draw, trained
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.operators.dense import dense_gradients, lookup_dense
from embforge.training.calls import Programs


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield


def dense(backend: Any = "reference", spec: CollectionSpec = SPEC, sparse: Any = False) -> EmbeddingCollection:
    return trained(backend, spec, optimizer=None, sparse=sparse)


def same_gradients(one: EmbeddingCollection, other: EmbeddingCollection) -> bool:
    return all(
        ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
        for ours, theirs in zip(one.parameters(), other.parameters(), strict=True)
    )


def towers(one: EmbeddingCollection, other: EmbeddingCollection, *batch: Any) -> Tensor:
    """Looks up the same ids twice in one module and once in another. Only products and sums, which compilers do not
    round differently."""
    return one(*batch) * 3 + one(*batch) * 0.5 + other(*batch)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_forward_and_backward_are_in_one_graph(compiler: str) -> None:
    modules, twins = (dense(), dense()), (dense(), dense())
    counter: Any = CompileCounterWithBackend(compiler)  # type: ignore[no-untyped-call]
    compiled = torch.compile(towers, backend=counter, fullgraph=True)
    optimizers = [torch.optim.Adam([*one.parameters(), *other.parameters()]) for one, other in (modules, twins)]
    for step in range(3):
        values, offsets, weights = draw(seed=step, size=6 + step)
        ours, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
        compiled(*modules, values, offsets, ours).sum().backward()
        towers(*twins, values, offsets, theirs).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
        assert same_gradients(modules[0], twins[0]) and same_gradients(modules[1], twins[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 2  # the second with dynamic shapes
    assert all(torch.equal(modules[0].weight(name), twins[0].weight(name)) for name in "ab")


def test_frozen_tables_are_not_trained_in_a_graph() -> None:
    module, twin = dense(), dense()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for each, call in ((module, compiled), (twin, twin)):
        each.freeze("a")
        call(*draw()).sum().backward()
        each.freeze()
        assert not call(*draw()).requires_grad
    assert module.weight("a").grad is None
    assert torch.equal(module.weight("b").grad, twin.weight("b").grad)  # type: ignore[arg-type]


def test_rows_may_change_before_the_backward() -> None:
    """As with nn.EmbeddingBag, gradients of rows need no rows; those of per-sample weights do."""
    compiled = torch.compile(module := dense(), backend="aot_eager", fullgraph=True)
    values, offsets, weights = draw()
    results = compiled(values, offsets, weights), compiled(values, offsets, weights.requires_grad_())
    with torch.no_grad():
        module.weight("a").mul_(2)
    results[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[1].sum().backward()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"optimizer": None}, "sparse gradients in a graph: make the EmbeddingCollection with sparse=False"),
        ({"optimizer": None, "sparse": ["b"]}, "sparse gradients in a graph"),
        ({"accumulate": True}, r"cannot be part of a graph: make the EmbeddingCollection without\s+accumulate=True"),
    ],
    ids=str,
)
def test_what_no_graph_can_hold_is_refused_with_the_remedy(options: dict[str, Any], remedy: str) -> None:
    module = trained(**options)
    with pytest.raises(Exception, match=remedy):
        torch.compile(module, backend="eager", fullgraph=True)(*draw())
    if "sparse" in options:
        module.freeze("b")  # the rest is dense
        torch.compile(module, backend="eager", fullgraph=True)(*draw()).sum().backward()
        assert module.weight("a").grad is not None


def test_the_profiler_sees_the_operators() -> None:
    module, twin = dense(spec=WITH_ROWS), dense(spec=WITH_ROWS)
    for each in (module, twin):
        if each is twin:
            _backward_of_all(twin)
            continue
        with torch.profiler.profile() as profile:
            _backward_of_all(module)
    assert {"embforge::lookup_dense", "embforge::dense_gradients"} <= {event.key for event in profile.key_averages()}
    assert same_gradients(module, twin)


def _backward_of_all(module: EmbeddingCollection) -> None:
    results = list(module.forward_dict(*draw(spec=WITH_ROWS)).values())
    torch.autograd.backward(results, [torch.full_like(result, 0.5) for result in results])


def test_meta_tensors_have_gradients_too() -> None:
    module = EmbeddingCollection(SPEC, device="meta", sparse=False)
    module(*(tensor.to("meta") for tensor in draw())).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None and parameter.grad.is_meta and parameter.grad.shape == parameter.shape


def test_an_fp8_table_is_refused_when_the_graph_is_made() -> None:
    spec = CollectionSpec([TableSpec("q", 9, 8, "fp8_e4m3")], [FeatureSpec("f", "q")])
    module = dense(spec=spec)
    module.weight("q").requires_grad_()
    with pytest.raises(Exception, match=r"table 'q': an fp8 table cannot be trained by torch\.optim"):
        torch.compile(module, backend="aot_eager")(torch.tensor([1, 2]), torch.tensor([0, 2])).sum().backward()


UNPADDED = CollectionSpec(
    [TableSpec("a", 60, 16), TableSpec("b", 12, 4, "bf16")],
    [*WITH_ROWS.features, FeatureSpec("c", "b", "concat", hotness=9)],
)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""The last copies tables and leaves no gaps between the rows of a copy."""


@pytest.mark.parametrize("weighted", [True, False])
def test_the_operators_pass_opcheck(weighted: bool) -> None:
    _check(dense(spec=UNPADDED), "reference", weighted)


@every_backend
def test_the_operators_of_every_backend_pass_opcheck(backend: Any) -> None:
    _check(dense(backend, WITH_ROWS), backend, True, CHECKS[:-1])


def _check(module: EmbeddingCollection, backend: Any, weighted: bool, checks: tuple[str, ...] = CHECKS) -> None:
    """Checks both operators with a spec that has all kinds of results."""
    values, offsets, weights = draw(backend, spec=module.spec)
    weights = weights if weighted else None
    programs: Programs = module.programs[torch.int64]
    tables, rows = list(module.parameters()), [int(offsets[24] - offsets[18])]
    texts = (programs.train, programs.reduce, programs.weight_gradient)
    arguments = (values, offsets, weights, tables, rows, *texts, "error")
    torch.library.opcheck(lookup_dense, arguments, test_utils=checks)
    pooled, sequence, divisors, winners = (found.detach() for found in lookup_dense(*arguments))
    given = (torch.randn_like(pooled), torch.randn_like(sequence), values, offsets, weights, divisors, winners)
    torch.library.opcheck(dense_gradients, (*given, programs.reduce, "error", [True, False]), test_utils=checks)
