"""On every backend, a module with remapped tables gives the same bits as a module that is called with the rows."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.backends import collection, device_of, every_backend, refusal
from conformance.training import WITH_ROWS, draw, nothing_changes, trained, trained_backend
from support.remaps import entries_of, ids_for, remapped
from torch import Tensor, nn

import embforge as ef
from embforge import id_resolution, optim
from embforge.cli.gen import emit
from embforge.codegen.errors import MissingKernelError, SpecError
from embforge.codegen.params import CpuParams
from embforge.codegen.plans import resolve_plan, training_plans
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import metadata_of, remap_metadata_of
from embforge.verify.remaps import remap_rows

SPEC = remapped(WITH_ROWS, ["a"])
"""One remapped table, with four features, and one whose ids are its rows."""
ENTRIES = entries_of(SPEC)
ONE = CollectionSpec([TableSpec("t", 3, 4, remap=7)], [FeatureSpec("f", "t")], name="one")
ROW_OF = [2, -1, 0, 1, 2, 2, -1]
EVERY = CollectionSpec(
    [TableSpec("t", 9, 8, remap=30), TableSpec("u", 5, 4)],
    [
        *(FeatureSpec(kind.name, "t", kind.name, kind.weightable, 4, padding_idx=29) for kind in POOLINGS.values()),
        FeatureSpec("plain", "u"),
        FeatureSpec("row", "u", padding_idx=2),
    ],
    name="every",
)
ENTRIES_OF_EVERY = torch.arange(30) % 9
ENTRIES_OF_EVERY[[7, 8]] = -1


def on(backend: str, tensors: Any) -> Any:
    return tuple(None if tensor is None else tensor.to(device_of(backend)) for tensor in tensors)


def drawn(backend: str, seed: int, dtype: torch.dtype = torch.int64) -> tuple[Any, Any]:
    """A batch of rows, and the same batch by ids."""
    values, offsets, weights = draw(spec=WITH_ROWS, seed=seed)
    ids = ids_for(SPEC, ENTRIES, values, offsets, seed)
    return on(backend, (values, offsets, weights)), on(backend, (ids.to(dtype), offsets.to(dtype), weights))


def stepped(module: ef.EmbeddingCollection, batch: Any) -> dict[str, Tensor]:
    """The results of a step, and the gradient of weights."""
    values, offsets, weights = batch
    weights = weights.clone().requires_grad_()
    results = module.forward_dict(values, offsets, weights)
    sum((k * result.pow(2)).sum() for k, result in enumerate(results.values(), 1)).backward()  # type: ignore[union-attr]
    assert weights.grad is not None
    return {name: result.detach() for name, result in results.items()} | {"weights": weights.grad}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def state(module: ef.EmbeddingCollection) -> dict[str, Tensor]:
    """All that training changes."""
    return {name: entry for name, entry in module.state_dict().items() if ".remap." not in name}


# ---- The same bits as rows ----------------------------------------------------------------------------


@every_backend
def test_it_looks_up_and_trains_the_rows_of_its_ids(backend: str) -> None:
    module, rows = trained(backend, SPEC, remap=ENTRIES), trained("reference", WITH_ROWS)
    for seed in range(2):
        by_rows, by_ids = drawn(backend, seed)
        assert same(stepped(module, by_ids), stepped(rows, by_rows))
    assert same(state(module), state(rows))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_ids_of_32_bits(backend: str) -> None:
    module, rows = trained(backend, SPEC, remap=ENTRIES), trained("reference", WITH_ROWS)
    by_rows, (values, offsets, weights) = drawn(backend, 4)
    with torch.no_grad():
        found = module.forward_dict(values.int(), offsets.int(), weights)
        assert same(found, rows.forward_dict(*by_rows))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": True},
        {"optimizer": {"a": optim.LAMB(lr=0.1), "*": optim.Ftrl(lr=0.1)}},
        {"optimizer": None},
        {"optimizer": None, "sparse": False},
    ],
    ids=["accumulated", "by table", "sparse", "dense"],
)
def test_it_trains_however_rows_train(options: dict[str, Any]) -> None:
    module, rows = (
        trained("reference", SPEC, remap=ENTRIES, **options),
        trained("reference", WITH_ROWS, **options),
    )
    by_rows, by_ids = drawn("reference", 1)
    assert same(stepped(module, by_ids), stepped(rows, by_rows))
    if options.get("accumulate"):
        module.step()
        rows.step()
    if options.get("optimizer", 1) is None:
        for name in ("a", "b"):
            grads = module.weight(name).grad, rows.weight(name).grad
            assert grads[0] is not None
            assert grads[1] is not None
            assert torch.equal(grads[0].to_dense(), grads[1].to_dense())
    assert same(state(module), state(rows))


@every_backend
@pytest.mark.parametrize("bounds_check", ["error", "zero", "unchecked"])
def test_ids_without_rows_and_padding_are_absent(backend: str, bounds_check: Any) -> None:
    """An id without a row is left out of pools, gives zeros in `concat` and `none`, and is never an error. Features of
    tables without a remap treat padding as before."""
    plain = replace(
        EVERY,
        tables=tuple(replace(table, remap=None) for table in EVERY.tables),
        features=tuple(replace(f, padding_idx=-1) if f.table == "t" else f for f in EVERY.features),
    )
    ids = [[29, 3, 7, 12], [8], [], [29]] * len(POOLINGS) + [[1, 2], [2], [], [4]] * 2
    lengths = torch.tensor([len(bag) for bag in ids])
    values = torch.tensor([i for bag in ids for i in bag])
    first = int(lengths[: 4 * len(POOLINGS)].sum())
    rows = values.clone()
    rows[:first] = torch.where(values[:first] == 29, -1, ENTRIES_OF_EVERY[values[:first]])
    weights = torch.linspace(0.5, 2, len(values), dtype=torch.float32)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    options: dict[str, Any] = {"optimizer": optim.SGD(lr=0.5), "bounds_check": bounds_check}
    torch.manual_seed(5)
    module = collection(EVERY, backend, remap={"t": ENTRIES_OF_EVERY}, **options)
    torch.manual_seed(5)
    truth = collection(plain, "reference", **options)
    if backend == "reference":
        assert same(stepped(module, (values, offsets, weights)), stepped(truth, (rows, offsets, weights)))
        assert same(state(module), state(truth))
        return
    with torch.no_grad():
        found = module.forward_dict(*on(backend, (values, offsets, weights)))
        assert same(found, truth.forward_dict(rows, offsets, weights))


@every_backend
def test_no_samples_and_no_ids(backend: str) -> None:
    module = collection(ONE, backend, remap={"t": ROW_OF})
    nothing, border = on(backend, (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
    assert module(nothing, border).shape == (0, 4)
    assert not module(nothing, border.repeat(3)).any()


@pytest.mark.parametrize("backend", ["cpu", "simt"])
def test_rows_of_ids_are_those_of_the_reference(backend: str) -> None:
    """The `resolve` kernels write the same numbers as the reference, for unknown ids and many features, too."""
    arch = "generic" if backend == "cpu" else "sm_90"
    (row,) = remap_rows(EVERY, backend, arch, device_of(backend), seed=1)
    assert row.passed, row.detail
    assert remap_rows(WITH_ROWS, backend, arch, device_of(backend), seed=1) == []


# ---- Mistakes -----------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("wrong", [7, -1, -8, 2**62 + 5, -(2**62), 2**63 - 1, -(2**63), 3 - 2**63])
def test_unknown_ids_are_named(backend: str, wrong: int) -> None:
    module = collection(ONE, backend, remap={"t": ROW_OF}, optimizer=optim.SGD(lr=1.0))
    values, offsets = on(backend, (torch.tensor([0, 1, 5, wrong]), torch.tensor([0, 2, 4])))
    told = (
        rf"feature 'f': id {wrong} of sample 1, position 1 is not an id of table 't'; allowed: 0 to 6 \(7 ids, which "
        r"remap turns into rows\)"
    )
    with nothing_changes(module), refusal(module, IndexError, told):
        module(values, offsets).sum().backward()
    zero = collection(ONE, backend, remap={"t": ROW_OF}, bounds_check="zero")
    assert torch.equal(zero(values, offsets)[1], zero(values[:3], offsets.clamp(max=3))[1])


@trained_backend
def test_unknown_int32_ids_are_named(backend: str) -> None:
    module = collection(ONE, backend, remap={"t": ROW_OF})
    for wrong in (-3, 7, 2**31 - 1, -(2**31)):
        values = torch.tensor([wrong], dtype=torch.int32, device=device_of(backend))
        with refusal(module, IndexError, f"id {wrong} of sample 0, position 0 is not an id of table 't'"):
            module(values, torch.tensor([0, 1], dtype=torch.int32, device=values.device))


@every_backend
def test_an_entry_that_became_no_row_is_found(backend: str) -> None:
    module = collection(ONE, backend, remap={"t": ROW_OF})
    values, offsets = on(backend, (torch.tensor([0, 4]), torch.tensor([0, 2])))
    for entry in (3, -2):
        module.remap("t")[4] = entry  # past all checks
        with refusal(module, IndexError, "the remap of table 't' has an entry that is no row for the id of"):
            module(values, offsets)


def test_large_batches_are_resolved_in_parts() -> None:
    """The borders of features are within the parts that threads take."""
    generator = torch.Generator("cpu").manual_seed(1)
    lengths = torch.tensor([20_001, 3, 30_005, 7] + [100] * 20)[: len(EVERY.features)].repeat_interleave(2)
    values = torch.randint(-3, 33, (int(lengths.sum()),), generator=generator)
    batch = Batch(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), None, 2, None)
    entries = [torch.randint(-1, 9, (30,), generator=generator)]
    found = {}
    for target, arch in (("cpu", "generic"), ("reference", "reference")):
        kernel = kernel_of(Program(resolve_plan(EVERY, target, arch, "int64")).text)
        found[target] = kernel(remap_metadata_of(EVERY, entries), entries, batch)
    assert torch.equal(found["cpu"], found["reference"])


def test_rows_past_32_bits_make_ids_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_resolution, "INT32_ROWS", 3)
    module = collection(ONE, "reference", remap={"t": ROW_OF})
    values, offsets = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    assert torch.equal(module(values, offsets), module(values.long(), offsets.long()))
    with pytest.raises(IndexError, match="id -5 of sample 0, position 1 is not an id of table 't'"):
        module(torch.tensor([0, -5], dtype=torch.int32), offsets)


def test_offsets_that_lie_are_found_as_ever() -> None:
    for backend in ("reference", "cpu", "simt"):
        module = collection(EVERY, backend, remap={"t": ENTRIES_OF_EVERY})
        for wrong in (9, -5):
            offsets = torch.full((len(EVERY.features) + 1,), 2)
            offsets[:2] = torch.tensor([0, wrong])
            with torch.no_grad(), pytest.raises(ValueError, match="offsets"):
                module.forward_dict(torch.tensor([0, 1]), offsets)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ([0, 1], ValueError, r"remap of table 't': shape \(2,\); allowed: \(7,\), an entry for each id"),
        ([0, 1, 2, 3, 0, 0, 0], ValueError, "entry 3 is 3; allowed: a row, 0 to 2, or -1 for an id without one"),
        ([0, -2, 2, 1, 0, 0, 0], ValueError, "entry 1 is -2; allowed"),
        (torch.zeros(7), TypeError, "got torch.float32; allowed: whole numbers, as a tensor of torch.int64"),
        ("rows", TypeError, "got str; allowed"),
        ([0.9, 1.0, 2.0, -0.9, 0.0, 0.0, 0.0], TypeError, "got torch.float64; allowed"),
        ([None] * 7, TypeError, "remap of table 't': .*; allowed: whole numbers, one for each id"),
    ],
)
def test_wrong_entries_are_refused(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ef.EmbeddingCollection(ONE, remap={"t": given})
    module = ef.EmbeddingCollection(ONE, remap={"t": ROW_OF})
    with pytest.raises(error, match=told):
        module.set_remap("t", given)
    assert module.remap("t").tolist() == ROW_OF


def test_entries_are_given_by_table_and_not_on_meta() -> None:
    with pytest.raises(TypeError, match="remap: got list; allowed: a mapping from tables to the row of each id"):
        ef.EmbeddingCollection(ONE, remap=ROW_OF)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="remap of table 't': the module is on the meta device"):
        ef.EmbeddingCollection(ONE, "meta", remap={"t": ROW_OF})


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_takes_the_place_of_entries_is_looked_at(backend: str) -> None:
    module = collection(ONE, backend, remap={"t": ROW_OF})
    values, offsets = torch.tensor([0, 4, 6]), torch.tensor([0, 2, 3])
    want, table = module(values, offsets), module.tables._modules["t"]
    held = module.remap("t")
    strided = torch.tensor(ROW_OF).repeat_interleave(2)[::2]
    for other in (held[:2], strided, held.int(), torch._neg_view(-held), held.to("meta")):
        table.remap.entries = other  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"its kernel needs a contiguous torch\.int64 tensor"):
            module(values, offsets)
    table.remap.entries = held.clone()  # type: ignore[union-attr]
    assert torch.equal(module(values, offsets), want)


def test_entries_written_from_outside_are_known() -> None:
    """Entries are written as by DistributedDataParallel, which sends the buffers of the first rank."""
    module = ef.EmbeddingCollection(ONE)
    module.remap("t").copy_(torch.tensor(ROW_OF))
    assert module(torch.tensor([5]), torch.tensor([0, 1])).any()
    assert "tables.t.remap.entries" in module.state_dict()


def test_a_module_made_under_inference_mode_takes_entries() -> None:
    with torch.inference_mode():
        module = ef.EmbeddingCollection(ONE)
    module.set_remap("t", ROW_OF)
    assert module(torch.tensor([5]), torch.tensor([0, 1])).any()


def test_a_dropped_module_is_freed_at_once() -> None:
    module = ef.EmbeddingCollection(ONE, backend="reference", remap={"t": ROW_OF})
    module(torch.tensor([5]), torch.tensor([0, 1]))
    gone, enabled = weakref.ref(module), gc.isenabled()
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


def test_metadata_lives_as_long_as_the_module() -> None:
    module = ef.EmbeddingCollection(ONE, backend="reference", remap={"t": ROW_OF})
    module(torch.tensor([5]), torch.tensor([0, 1]))
    first = module._resolve._cached[0].metadata  # type: ignore[union-attr]
    for size in range(300):
        metadata_of([torch.empty((size + 1, 2))], "error")
    module(torch.tensor([5]), torch.tensor([0, 1]))
    assert module._resolve._cached[0].metadata is first  # type: ignore[union-attr]


def test_entries_for_tables_that_have_none_are_refused() -> None:
    spec = replace(ONE, tables=(*ONE.tables, TableSpec("u", 3, 4)), features=(*ONE.features, FeatureSpec("g", "u")))
    with pytest.raises(ValueError, match="table 'u' has no remap: its ids are its rows; allowed: 't'"):
        ef.EmbeddingCollection(spec, remap={"u": [0, 1, 2]})
    with pytest.raises(SpecError, match="table 'v' does not exist"):
        ef.EmbeddingCollection(spec, remap={"v": [0, 1, 2]})
    with pytest.raises(SpecError, match="table 't': remap=0 is out of range; allowed: 1 to"):
        TableSpec("t", 3, 4, remap=0)


# ---- State --------------------------------------------------------------------------------------------


def test_entries_must_be_given_or_loaded() -> None:
    module = ef.EmbeddingCollection(ONE)
    with pytest.raises(RuntimeError, match=r"which rows its 7 ids have is not known yet; make the module with remap="):
        module(torch.tensor([0]), torch.tensor([0, 1]))
    module.set_remap("t", ROW_OF)
    other = ef.EmbeddingCollection(ONE)
    other.load_state_dict(module.state_dict())
    assert other.remap("t").tolist() == ROW_OF
    assert torch.equal(other(torch.tensor([5]), torch.tensor([0, 1])), module(torch.tensor([5]), torch.tensor([0, 1])))
    with pytest.raises(RuntimeError, match=r"Missing key.*tables\.t\.remap\.entries"):
        other.load_state_dict({name: entry for name, entry in module.state_dict().items() if "remap" not in name})
    wrong = module.state_dict() | {"tables.t.remap.entries": torch.full((7,), 3)}
    with pytest.raises(RuntimeError, match=r"remap\.entries: remap of table 't': entry 0 is 3; allowed"):
        other.load_state_dict(wrong)
    assert other.remap("t").tolist() == ROW_OF


@pytest.mark.parametrize("optimizer", [None, optim.Adam(lr=0.1)], ids=["parameters", "fused"])
def test_copies_and_moves_keep_the_entries(optimizer: Any) -> None:
    module = ef.EmbeddingCollection(ONE, remap={"t": ROW_OF}, optimizer=optimizer)
    values, offsets = torch.tensor([0, 4, 5]), torch.tensor([0, 2, 3])
    want = module(values, offsets).detach()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(module).half().double()):
        assert torch.equal(other(values, offsets), want)
        other.set_remap("t", [0] * 7)
        assert torch.equal(module(values, offsets), want)
    empty = ef.EmbeddingCollection(ONE, "meta", optimizer=optimizer)
    assert empty(values.to("meta"), offsets.to("meta")).shape == want.shape
    assigned = copy.deepcopy(empty)
    assigned.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(assigned(values, offsets), want)
    with pytest.raises(RuntimeError, match="not known yet"):
        empty.to_empty(device="cpu")(values, offsets)
    assert [name for name, _ in module.named_buffers()] == ["tables.t.remap.entries"]
    assert "7 ids" in repr(module)


# ---- Graphs and files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, optim.SGD(lr=0.1)], ids=["dense", "fused"])
def test_compiled_calls_have_the_same_bits(optimizer: Any) -> None:
    """The same ids twice in one graph, and entries that change after it was made."""
    options: dict[str, Any] = {"optimizer": optimizer} | ({} if optimizer else {"sparse": False})
    module, twin = (trained("cpu", ONE, remap={"t": ROW_OF}, **options) for _ in range(2))

    def twice(collection: ef.EmbeddingCollection, values: Tensor, offsets: Tensor) -> Tensor:
        return collection(values, offsets).sum() + 2 * collection(values, offsets).pow(2).sum()

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for ids in ([0, 1, 2, 5], [3, 6, 4, 4]):
        values, offsets = torch.tensor(ids), torch.tensor([0, 1, 4])
        got, want = compiled(module, values, offsets), twice(twin, values, offsets)
        assert torch.equal(got, want)
        got.backward()
        want.backward()
    assert same(state(module), state(twin))
    for each in (module, twin):
        each.set_remap("t", ROW_OF[::-1])
    assert torch.equal(compiled(module, values, offsets), twice(twin, values, offsets))


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ef.EmbeddingCollection(SPEC, remap=ENTRIES)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.rows.forward_dict(values, offsets)["x"]


def test_exported_programs_hold_the_entries_and_no_machine(tmp_path: Path) -> None:
    model = Served()
    _, (values, offsets, _) = drawn("cpu", 3)
    with torch.no_grad():
        program = torch.export.export(model, (values, offsets), strict=False)
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        assert torch.equal(loaded(values, offsets), model(values, offsets))
    assert "embforge.resolve" in program.graph_module.code
    assert "avx" not in program.graph_module.code
    assert torch.equal(program.state_dict["rows.tables.a.remap.entries"], ENTRIES["a"])


def test_kernels_of_lookups_are_those_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = training_plans(SPEC, "cpu", "generic", "int64", CpuParams())
    of_rows = training_plans(WITH_ROWS, "cpu", "generic", "int64", plans["forward"].params)
    padded = replace(
        WITH_ROWS, features=tuple(replace(f, padding_idx=-1) if f.table == "a" else f for f in SPEC.features)
    )
    assert "resolve" not in of_rows
    assert plans["forward"].nameless == replace(of_rows["forward"], spec=padded).nameless
    other = replace(SPEC, tables=(replace(SPEC.tables[0], num_embeddings=7, embedding_dim=3), SPEC.tables[1]))
    assert plans["resolve"].nameless == replace(plans["resolve"], spec=other).nameless

    served = ef.EmbeddingCollection(SPEC, remap=ENTRIES)
    _, (values, offsets, weights) = drawn("cpu", 0)
    want = served.forward_dict(values, offsets, weights)
    ready = served.plans()
    emit([ready["forward"]], tmp_path / "lookup")
    emit([ready["forward"], ready["resolve"]], tmp_path / "both")
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "nothing"))
    with torch.inference_mode():
        found = ef.EmbeddingCollection(SPEC, remap=ENTRIES, kernels=tmp_path / "both")
        found.load_state_dict(served.state_dict())
        assert same(found.forward_dict(values, offsets, weights), {k: v.detach() for k, v in want.items()})
        lacking = ef.EmbeddingCollection(SPEC, remap=ENTRIES, kernels=tmp_path / "lookup")
        with pytest.raises(MissingKernelError, match="resolve_cpu"):
            lacking.forward_dict(values, offsets, weights)
