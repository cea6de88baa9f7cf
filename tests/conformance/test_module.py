"""EmbeddingCollection as a torch module: calls, copies, pickles, state dicts, moves, casts, compiled graphs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from conformance.backends import collection, device_of, every_backend
from torch import Tensor, nn

from embforge.codegen.dtypes import TABLE_DTYPES
from embforge.codegen.errors import SpecError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.jagged import Jagged
from embforge.number_formats import torch_dtype
from embforge.verify.cases import Case, draw_batch

POOLED = CollectionSpec(
    [TableSpec("a", 100, 7), TableSpec("b", 50, 16, "bf16"), TableSpec("c", 30, 33, "fp8_e4m3")],
    [FeatureSpec("x", "a"), FeatureSpec("y", "b", "mean", weighted=True), FeatureSpec("z", "c", "max")],
    name="pooled",
)
MIXED = CollectionSpec(
    POOLED.tables, [*POOLED.features, FeatureSpec("s", "a", "none"), FeatureSpec("t", "b", "none")], name="mixed_module"
)


def batch(module: EmbeddingCollection, seed: int = 0, **fields: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return draw_batch(module.spec, Case(**{"batch": 6} | fields), seed, module.device)


def same_everywhere(one: EmbeddingCollection, other: EmbeddingCollection) -> bool:
    ours, theirs = (m.forward_dict(*batch(m)) for m in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@every_backend
def test_the_result_has_the_features_next_to_each_other(backend: Any) -> None:
    module = collection(POOLED, backend)
    result, parts = module(*batch(module)), module.forward_dict(*batch(module))
    assert result.shape == (6, 7 + 16 + 33) and result.dtype == torch.float32
    assert list(parts) == ["x", "y", "z"]
    assert torch.equal(result, torch.cat(list(parts.values()), dim=1))


@every_backend
def test_sequence_features_have_one_row_per_id(backend: Any) -> None:
    module = collection(MIXED, backend)
    values, offsets, weights = batch(module)
    result = module.forward_dict(values, offsets, weights)
    borders = offsets[::6].tolist()
    for name, index, table in (("s", 3, "a"), ("t", 4, "b")):
        ids = values[borders[index] : borders[index + 1]]
        assert torch.equal(result[name], module.weight(table).float()[ids])


@every_backend
def test_every_form_of_input_gives_the_same_result(backend: Any) -> None:
    module = collection(POOLED, backend)
    values, offsets, weights = batch(module)
    want = module(values, offsets, weights)
    lengths = offsets.diff()
    assert torch.equal(want, module(values, lengths=lengths, weights=weights))
    assert torch.equal(want, module(values.int(), offsets.int(), weights))
    assert torch.equal(want, module(values.int(), offsets, weights))
    assert torch.equal(want, module(values, offsets.int(), weights))
    assert torch.equal(want, module(Jagged(values, lengths=lengths, weights=weights)))
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert torch.equal(want, module(nested, weights=weights))


@every_backend
@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_batches_without_ids_give_zeros(backend: Any, batch_size: int) -> None:
    module = collection(MIXED, backend)
    none = torch.zeros(5 * batch_size + 1, dtype=torch.int64, device=module.device)
    result = module.forward_dict(none[:0], none)
    assert result["x"].shape == (batch_size, 7) and result["s"].shape == (0, 7) and result["t"].shape == (0, 16)
    assert not any(tensor.any() for tensor in result.values())


@every_backend
def test_changes_of_weight_change_lookups(backend: Any) -> None:
    module = collection(POOLED, backend)
    with torch.no_grad():
        module.weight("a").fill_(3.0)
    ids, offsets = (torch.tensor(numbers, device=module.device) for numbers in ([5], [0, 1, 1, 1]))
    assert module(ids, offsets)[0, :7].tolist() == [3.0] * 7
    with pytest.raises(SpecError, match=r"'nope'.*a, b, c"):
        module.weight("nope")


@every_backend
def test_a_deepcopy_shares_no_memory(backend: Any) -> None:
    module = collection(MIXED, backend)
    module.forward_dict(*batch(module))
    twin = copy.deepcopy(module)
    assert same_everywhere(module, twin)
    assert twin.weight("a").stride() == module.weight("a").stride()
    with torch.no_grad():
        twin.weight("a").zero_()
    assert module.weight("a").any() and not same_everywhere(module, twin)


@every_backend
def test_a_pickled_module_gives_the_same_results(backend: Any) -> None:
    """The spec has no fp8, which torch (2.13) pickles but cannot read back by pickle alone; torch.save can."""
    spec = CollectionSpec(POOLED.tables[:2], POOLED.features[:2])
    module = collection(spec, backend)
    module(*batch(module))
    loaded = pickle.loads(pickle.dumps(module))
    assert same_everywhere(module, loaded)
    assert loaded.weight("a").stride() == module.weight("a").stride()


def test_tables_of_every_format_are_saved_and_copied() -> None:
    tables = [TableSpec(f"t_{dtype}", 20, 9, dtype) for dtype in TABLE_DTYPES]  # type: ignore[arg-type]
    module = collection(CollectionSpec(tables, [FeatureSpec(f"f_{t.name}", t.name) for t in tables]), "reference")
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    other = collection(module.spec, "reference")
    assert not same_everywhere(module, other)
    other.load_state_dict(torch.load(stream))
    assert same_everywhere(module, other) and same_everywhere(module, copy.deepcopy(module))
    assert [other.weight(t.name).dtype for t in tables] == [torch_dtype(t.dtype) for t in tables]


@every_backend
def test_a_module_saved_by_torch_gives_the_same_results(backend: Any) -> None:
    module = collection(MIXED, backend)
    module.forward_dict(*batch(module))
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert same_everywhere(module, loaded)
    assert loaded.weight("a").stride() == module.weight("a").stride()


@every_backend
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_restores_all_tables(backend: Any, assign: bool) -> None:
    module, other = (collection(MIXED, backend) for _ in range(2))
    state = module.state_dict()
    assert list(state) == ["tables.a.weight", "tables.b.weight", "tables.c.weight"]
    assert all(tensor.is_contiguous() for tensor in state.values())
    other.forward_dict(*batch(other))
    assert not same_everywhere(module, other)
    other.load_state_dict(state, assign=assign)
    assert same_everywhere(module, other)
    assert other.weight("a").stride() == module.weight("a").stride()
    with torch.no_grad():
        other.weight("a").zero_()
    assert module.weight("a").any()


@every_backend
def test_a_state_dict_that_does_not_fit_is_refused(backend: Any) -> None:
    module = collection(POOLED, backend)
    state = module.state_dict()
    with pytest.raises(RuntimeError, match=r"tables\.a\.weight"):
        module.load_state_dict({k: v for k, v in state.items() if k != "tables.a.weight"})
    with pytest.raises(RuntimeError, match=r"tables\.a\.weight"):
        module.load_state_dict({**state, "tables.a.weight": torch.zeros(3, 3)})
    for extra in ("extra", "tables.d.weight", "tables.a.bias"):
        with pytest.raises(RuntimeError, match=f"Unexpected.*{extra}"):
            module.load_state_dict({**state, extra: torch.zeros(1)})
    assert module.load_state_dict({}, strict=False).missing_keys == list(state)


@every_backend
@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
def test_casting_a_model_leaves_the_tables_as_the_spec_says(backend: Any, cast: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), collection(POOLED, backend))
    before = model[1](*batch(model[1]))
    getattr(model, cast)()
    assert model[0].weight.dtype != torch.float32
    assert torch.equal(before, model[1](*batch(model[1])))
    assert model[1].weight("a").dtype == torch.float32


@every_backend
def test_a_module_moves_to_meta_and_back(backend: Any) -> None:
    module = collection(POOLED, backend)
    meta = EmbeddingCollection(POOLED, device="meta", backend=backend)
    assert meta.weight("a").is_meta
    meta.load_state_dict(module.state_dict(), assign=True)
    assert same_everywhere(module, meta)
    empty = EmbeddingCollection(POOLED, device="meta", backend=backend).to_empty(device=device_of(backend))
    empty.load_state_dict(module.state_dict())
    assert same_everywhere(module, empty)


@every_backend
def test_call_on_the_meta_device_gives_shapes(backend: Any) -> None:
    meta = EmbeddingCollection(POOLED, device="meta", backend=backend)
    values, offsets, weights = (t.to("meta") for t in batch(collection(POOLED, "reference")) if t is not None)
    assert meta(values, offsets, weights).shape == (6, 56)


@every_backend
def test_to_the_same_device_changes_nothing(backend: Any) -> None:
    module = collection(POOLED, backend)
    address = module.weight("a").data_ptr()
    assert module.to(device_of(backend)).weight("a").data_ptr() == address


@every_backend
def test_tables_may_have_names_of_module_attributes(backend: Any) -> None:
    spec = CollectionSpec(
        [TableSpec(name, 10, 4) for name in ("forward", "type", "training", "a.b")],
        [FeatureSpec(name, name) for name in ("forward", "type", "training", "a.b")],
    )
    module = collection(spec, backend)
    other = collection(spec, backend)
    other.load_state_dict(module.state_dict())
    assert same_everywhere(module, other)


@every_backend
def test_reset_parameters_is_reproducible(backend: Any) -> None:
    module = collection(POOLED, backend)
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    assert same_everywhere(module, collection(POOLED, backend))
    for name, rows in (("a", 100), ("b", 50), ("c", 30)):  # an fp8 number may be rounded up by a sixteenth
        weight = module.weight(name).float()
        assert 0.5 * rows**-0.5 < float(weight.abs().max()) <= 1.0625 * rows**-0.5


@every_backend
def test_threads_of_python_share_a_module(backend: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    module = collection(POOLED, backend)
    batches = [batch(module, seed, batch=64) for seed in range(16)]
    want = [module(*b) for b in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, want, pool.map(lambda b: module(*b), batches)))
