"""What ranks do in the tests of remapped tables that are sharded."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from support.remaps import entries_of, ids_for, remapped
from support.sharded.mix import SPEC, batch_of, made, rows_of, step

import embforge as ef
from embforge.sharded import ShardPlan, remap_agreement
from embforge.storage.remap import digests_of

REMAPPED = remapped(SPEC, ["rows", "whole", "copied"])
ENTRIES = entries_of(REMAPPED)


def same_as_rows(rank: int, size: int, backend: str) -> dict[str, bool]:
    """Compares a module that takes ids with one that takes their rows: results, and the rows after two steps."""
    module, twin = made(REMAPPED, backend=backend, remap=ENTRIES), made(backend=backend)
    results = []
    for seed in range(2):
        values, offsets, weights = batch_of(10 * seed + rank, 3)
        ids = ids_for(REMAPPED, ENTRIES, values, offsets, seed)
        results.append((step(module, (ids, offsets, weights)), step(twin, (values, offsets, weights))))
    return {
        "results": all(_equal(*pair) for pair in results),
        "rows": all(torch.equal(module.full(name), twin.full(name)) for name in rows_of(SPEC)),
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def state_and_mistakes(rank: int, size: int) -> dict[str, Any]:
    """What a state dict holds, and what is said of ranks without entries, with others, and with an unknown id."""
    told: dict[str, Any] = {}
    module, empty = made(REMAPPED, remap=ENTRIES), made(REMAPPED)
    batch = _batch(rank)
    told["unknown entries"] = _error(lambda: empty.forward_dict(*batch))
    state = module.state_dict()
    told["keys"] = sorted(key for key in state if "remap" in key)
    empty.load_state_dict(state)
    rows = module.full("rows")
    told["bad load"] = _error(
        lambda: module.load_state_dict(
            {key: entry + 1 if key.endswith(".weight") else entry for key, entry in state.items()}
            | {"tables.rows.remap.entries": torch.full((21,), 99)}
        )
    )
    told["untouched"] = torch.equal(rows, module.full("rows"))
    told["buffers"] = [name for name, _ in module.named_buffers()]
    told["loaded"] = _equal(empty.forward_dict(*batch), module.forward_dict(*batch))
    values, offsets, weights = batch
    wrong = values.clone()
    if rank == size - 1:
        wrong[0] = -5
    before = module.full("rows")
    told["unknown id"] = _error(lambda: module.forward_dict(wrong, offsets, weights))
    told["unchanged"] = torch.equal(before, module.full("rows"))
    others = {name: entries.flip(0) if rank else entries for name, entries in ENTRIES.items()}
    told["others"] = _error(lambda: made(REMAPPED, remap=others))
    short = {name: entries[1:] if rank else entries for name, entries in ENTRIES.items()}
    told["refused"] = _error(lambda: made(REMAPPED, remap=short))
    told["a list"] = _error(lambda: made(REMAPPED, remap=[0] if rank else ENTRIES))
    plan = ShardPlan.row_wise(REMAPPED)
    summed = ef.CollectionSpec((ef.TableSpec("t", 3, 4, remap=9),), (ef.FeatureSpec("f", "t"),))
    told["fused"] = _error(lambda: ef.sharded.DistributedSparseEmbedding(summed, optimizer=ef.optim.SGD(lr=0.1)))
    told["plan"] = made(REMAPPED, plan, remap=ENTRIES).remap("rows").tolist() == ENTRIES["rows"].tolist()
    return told


def differences_after_construction(rank: int, size: int) -> dict[str, Any]:
    """What the next call raises after one rank has set, written or loaded other entries, and what follows."""
    told: dict[str, Any] = {}
    module = made(REMAPPED, remap=ENTRIES)
    batch, last = _batch(rank), rank == size - 1
    state = {key: entry.clone() for key, entry in module.state_dict().items()}
    expected = module.forward_dict(*batch)
    rows = module.full("rows")
    if last:
        module.set_remap("rows", ENTRIES["rows"].flip(0))
    told["set"] = _error(lambda: module.forward_dict(*batch))
    module.set_remap("rows", ENTRIES["rows"])
    told["set again"] = _equal(module.forward_dict(*batch), expected)
    if last:
        module.remap("rows")[0] = 1 - ENTRIES["rows"][0].clamp(0, 1)
        module.remap("whole").copy_(ENTRIES["whole"].flip(0))
    told["written"] = _error(lambda: module.forward_dict(*batch))
    flipped = {key: entry.flip(0) if last and "copied.remap" in key else entry for key, entry in state.items()}
    module.load_state_dict(flipped)
    told["loaded"] = _error(lambda: module.forward_dict(*batch))
    module.load_state_dict(state)
    told["loaded again"] = _equal(module.forward_dict(*batch), expected)
    told["rows"] = torch.equal(rows, module.full("rows"))
    if last:
        module.set_remap("rows", torch.full_like(ENTRIES["rows"], -1))
    wrong = batch[0].clone()
    wrong[0] = -5 if last else wrong[0]
    told["with a bad id"] = _error(lambda: module.forward_dict(wrong, *batch[1:]))
    told["with no batch"] = _error(lambda: module.forward_dict(None if last else batch[0], *batch[1:]))
    return told


def digests_are_kept(rank: int, size: int) -> list[int]:
    """How many digests are computed in three calls, and in one call after a table was set."""
    module = made(REMAPPED, remap=ENTRIES)
    batch, counts = _batch(rank), []
    with mock.patch.object(remap_agreement, "digests_of", side_effect=digests_of) as computed:
        for _ in range(3):
            module.forward_dict(*batch)
        counts.append(computed.call_count)
        module.set_remap("rows", ENTRIES["rows"])
        module.forward_dict(*batch)
        counts.append(computed.call_count - counts[0])
    return counts


def header_bytes_sent(rank: int, size: int) -> list[int]:
    """The bytes of a header to another rank: with remapped tables, and with their rows as ids."""
    found = []
    for spec, entries, batch in ((REMAPPED, ENTRIES, _batch(rank)), (SPEC, None, batch_of(rank, 3, least=1))):
        module = made(spec, remap=entries)
        module.forward_dict(*batch)
        found.append(module.counters()["header"])
    return found


def _batch(rank: int) -> Any:
    values, offsets, weights = batch_of(rank, 3, least=1)
    return ids_for(REMAPPED, ENTRIES, values, offsets, rank), offsets, weights


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
