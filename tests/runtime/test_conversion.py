"""Collections made from torch's own modules, and serving modules that load training checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.training import SPEC, trained
from torch import nn

import embforge as ef
from embforge.codegen.errors import SpecError
from embforge.collection import EmbeddingCollection

LENGTHS = torch.tensor([[2, 0, 3], [1, 1, 2], [0, 2, 4], [2, 2, 1]])
"""Ids of each of four features in each of three samples."""


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    shared = nn.EmbeddingBag(20, 6, mode="mean", padding_idx=3)
    return {
        "clicked": shared,
        "user": nn.EmbeddingBag(50, 8, mode="sum"),
        "liked": shared,
        "best": nn.EmbeddingBag(10, 4, mode="max"),
    }


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    counts = LENGTHS.sum(dim=1).tolist()
    generator = torch.Generator().manual_seed(1)
    sizes = (20, 50, 20, 10)
    ids = [torch.randint(size, (count,), generator=generator) for size, count in zip(sizes, counts, strict=True)]
    ids[0][0] = 3  # the padding id
    return torch.cat(ids), LENGTHS.flatten()


@pytest.mark.parametrize("weighted", [(), ("user",)])
def test_results_and_gradients_are_those_of_the_modules(weighted: tuple[str, ...]) -> None:
    given = modules()
    made = EmbeddingCollection.from_modules(given, weighted=weighted, backend="reference")
    assert [table.name for table in made.spec.tables] == ["clicked", "user", "best"]
    values, lengths = batch()
    weights = torch.rand(values.numel()) if weighted else None
    found = made.forward_dict(values, lengths=lengths, weights=weights)
    begins = [0, *LENGTHS.sum(dim=1).cumsum(0).tolist()]
    for index, (name, module) in enumerate(given.items()):
        ids = slice(begins[index], begins[index + 1])
        offsets = nn.functional.pad(LENGTHS[index].cumsum(0)[:-1], (1, 0))
        own = weights[ids] if weights is not None and name in weighted else None
        expected: Any = module(values[ids], offsets, per_sample_weights=own)
        torch.testing.assert_close(found[name], expected)
        (expected * torch.arange(expected.shape[1])).sum().backward()
        (found[name] * torch.arange(expected.shape[1])).sum().backward(retain_graph=True)
    for name in ("clicked", "user", "best"):
        torch.testing.assert_close(made.weight(name).grad.to_dense(), given[name].weight.grad)  # type: ignore[union-attr]


def test_rows_of_an_embedding_come_one_by_one() -> None:
    table = nn.Embedding(9, 5, padding_idx=0, dtype=torch.bfloat16)
    made = EmbeddingCollection.from_modules({"token": table}, backend="reference")
    ids = torch.tensor([0, 8, 8, 1])
    found = made.forward_dict(ids, lengths=torch.tensor([1, 3]))["token"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, table(ids))


def test_tied_and_frozen_weights_stay_so() -> None:
    one, other = nn.Embedding(9, 5), nn.EmbeddingBag(9, 5, mode="sum")
    other.weight = one.weight
    frozen = nn.EmbeddingBag(4, 5, mode="sum").requires_grad_(False)
    made = EmbeddingCollection.from_modules(
        {"a": one, "b": other, "c": frozen}, optimizer=ef.optim.SGD(lr=1.0), backend="reference"
    )
    assert [feature.table for feature in made.spec.features] == ["a", "a", "c"]
    assert "frozen: c" in repr(made) and made.num_parameters() == 9 * 5 + 4 * 5


def test_gradients_are_sparse_where_those_of_the_modules_are() -> None:
    one, other = nn.EmbeddingBag(9, 5, mode="sum", sparse=True), nn.EmbeddingBag(9, 5, mode="sum", sparse=False)
    other.weight = one.weight  # torch's modules would give it a dense gradient
    given = {"a": one, "b": other, "c": nn.Embedding(9, 5, sparse=True), "d": nn.Embedding(9, 5)}
    kinds = [({}, [False, True, False]), ({"sparse": True}, [True] * 3), ({"sparse": ["d"]}, [False, False, True])]
    for options, expected in kinds:
        made = EmbeddingCollection.from_modules(given, backend="reference", **options)
        results = made.forward_dict(torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64))
        torch.stack([result.sum() for result in results.values()]).sum().backward()
        assert [made.weight(name).grad.is_sparse for name in "acd"] == expected  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="sparse=True goes with optimizer=None only"):
        EmbeddingCollection.from_modules(given, optimizer=ef.optim.SGD(lr=1.0), sparse=True)


class Derived(nn.EmbeddingBag):
    pass


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.EmbeddingBag(4, 5, max_norm=1.0), "'a' has max_norm=1.0, which cannot be kept"),
        (nn.Embedding(4, 5, scale_grad_by_freq=True), "'a' has scale_grad_by_freq=True"),
        (Derived(4, 5), "'a' is a Derived; allowed: nn.Embedding and nn.EmbeddingBag"),
        (nn.Embedding(4, 5, dtype=torch.float64), "'a' has rows of torch.float64; allowed: torch.float32"),
    ],
    ids=["max_norm", "scale", "derived", "dtype"],
)
def test_what_cannot_be_kept_is_refused(module: nn.Module, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        EmbeddingCollection.from_modules({"a": module})


def test_hooks_unknown_names_and_no_modules_are_refused() -> None:
    hooked = nn.Embedding(4, 5)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(SpecError, match="'a' has forward hooks"):
        EmbeddingCollection.from_modules({"a": hooked})
    with pytest.raises(SpecError, match="weighted names 'b'; the modules are 'a'"):
        EmbeddingCollection.from_modules({"a": nn.Embedding(4, 5)}, weighted=["b"])
    with pytest.raises(SpecError, match="the dict has no modules"):
        EmbeddingCollection.from_modules({})
    with pytest.raises(SpecError, match="got a EmbeddingBag; pass a dict from feature names"):
        EmbeddingCollection.from_modules(nn.EmbeddingBag(4, 5))  # type: ignore[arg-type]


def test_a_serving_module_loads_a_training_checkpoint_strictly() -> None:
    state = nn.ModuleDict({"tables": trained()}).state_dict()
    serving = nn.ModuleDict({"tables": EmbeddingCollection(SPEC, backend="reference")})
    serving.load_state_dict(state)
    assert torch.equal(serving.state_dict()["tables.tables.a.weight"], state["tables.tables.a.weight"])
    for key in ("tables.tables.c.optim.m", "tables.tables.a.other", "tables.momentum", "tables.tables.a.weights"):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            serving.load_state_dict(state | {key: torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Unexpected key"):  # a module that trains knows its states by name
        trained().load_state_dict(trained().state_dict() | {"tables.a.optim.other": torch.zeros(1)})


def test_a_collection_is_printed_with_its_tables() -> None:
    text = repr(EmbeddingCollection(SPEC, backend="reference"))
    assert "2 tables, 3 features, 948 parameters, 3.94 kB" in text
    assert "(b): ParameterTable(12 x 4 bf16, 96 B)" in text
    many = ef.CollectionSpec(
        [ef.TableSpec(f"t{i}", 10, 4) for i in range(30)], [ef.FeatureSpec(f"f{i}", f"t{i}") for i in range(30)]
    )
    assert "... and 19 more tables" in repr(EmbeddingCollection(many, backend="reference"))
    states = repr(EmbeddingCollection(SPEC, backend="reference", optimizer=ef.optim.Adam()))
    assert "7.68 kB of optimizer states" in states


def test_the_code_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "from_torch.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    exec(compile(code, page.name, "exec"), {})
