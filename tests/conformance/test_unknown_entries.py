"""Remaps whose entries are not known yet: they are saved and loaded as such, and no lookup takes them for rows."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import embforge as ef
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.storage.table import weights_of

SPEC = CollectionSpec([TableSpec("t", 3, 4, remap=7)], [FeatureSpec("f", "t")], name="one")
ENTRIES = [2, -1, 0, 1, 2, 2, -1]
BATCH = torch.tensor([0, 3, 6]), torch.tensor([0, 1, 3])
KEY = "tables.t.remap.entries"


def collection(**options: Any) -> ef.EmbeddingCollection:
    """Absent ids are zeros here, so that entries taken for absent ones would give zeros without an error."""
    return ef.EmbeddingCollection(SPEC, bounds_check="zero", sparse=False, **options)


def assert_unknown(module: ef.EmbeddingCollection) -> None:
    with pytest.raises(RuntimeError, match="which rows its 7 ids have is not known yet"):
        module(*BATCH)


def test_a_module_loads_its_own_state_dict() -> None:
    module = collection()
    module.load_state_dict(module.state_dict())
    assert_unknown(module)
    module.set_remap("t", ENTRIES)
    module.load_state_dict(collection().state_dict())
    assert_unknown(module)


def test_a_distributed_checkpoint_restores_entries_into_a_new_module(tmp_path: Path) -> None:
    known, module = collection(remap={"t": ENTRIES}), collection()
    dcp.save(known.state_dict(), checkpoint_id=tmp_path)
    restored = module.state_dict()
    dcp.load(restored, checkpoint_id=tmp_path)
    module.load_state_dict(restored)
    assert torch.equal(module(*BATCH), known(*BATCH))


def test_entries_of_a_functional_call_are_of_that_call_only() -> None:
    module = collection()
    result = torch.func.functional_call(module, {KEY: torch.tensor(ENTRIES)}, BATCH)
    assert result.count_nonzero() == 8
    assert_unknown(module)


def test_a_part_of_the_entries_is_not_enough() -> None:
    module = collection()
    module.remap("t")[:6] = torch.tensor(ENTRIES[:6])
    assert_unknown(module)
    module.remap("t")[6] = ENTRIES[6]
    assert torch.equal(module(*BATCH), _like(module)(*BATCH))


def _like(module: ef.EmbeddingCollection) -> ef.EmbeddingCollection:
    twin = collection(remap={"t": ENTRIES})
    with torch.no_grad():
        twin.weight("t").copy_(module.weight("t"))
    return twin


def test_a_mix_of_known_and_unknown_entries_is_not_loaded() -> None:
    module = collection()
    mixed = module.state_dict() | {KEY: torch.tensor([-2, *ENTRIES[1:]])}
    with pytest.raises(RuntimeError, match="entry 0 is -2; allowed: a row, 0 to 2"):
        module.load_state_dict(mixed)
    assert_unknown(module)


def test_no_graph_is_made_of_unknown_entries() -> None:
    module = collection(backend="reference")
    with pytest.raises(RuntimeError, match=r"a graph is made before it is known .*call set_remap\('t', entries\)"):
        torch.export.export(module, BATCH)
    module.set_remap("t", ENTRIES)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*BATCH), module(*BATCH))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_know_what_the_module_knows(copied: Any) -> None:
    assert_unknown(copied(collection()))
    module = collection(remap={"t": ENTRIES})
    assert torch.equal(copied(module)(*BATCH), module(*BATCH))


def test_entries_of_other_layouts_and_types() -> None:
    with pytest.raises(TypeError, match="remap of table 't': got a tensor that is sparse or nested"):
        collection(remap={"t": torch.tensor(ENTRIES).to_sparse()})
    with pytest.raises(ValueError, match=r"shape \(0,\); allowed: \(7,\)"):
        collection(remap={"t": []})
    for dtype in (torch.int8, torch.int16, torch.int32):
        assert collection(remap={"t": torch.tensor(ENTRIES, dtype=dtype)}).remap("t").tolist() == ENTRIES


def test_a_kind_of_table_may_compute_its_rows() -> None:
    class Computed(nn.Module):
        @property
        def weight(self) -> Tensor:
            return torch.ones(2, 2)

    for fused in (False, True):
        (rows,) = weights_of([Computed()], fused)  # type: ignore[list-item]
        assert rows.tolist() == [[1, 1], [1, 1]]
