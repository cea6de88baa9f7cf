"""A sharded collection inside torch's own machinery: DDP, FSDP2, meshes, groups, state dicts, Join, torch.compile."""

from __future__ import annotations

from pathlib import Path

from support.sharded import torch_ranks as work
from support.sharded.ranks import run_ranks


def test_wrappers_leave_shards_alone_and_train_as_one_process() -> None:
    for found in run_ranks(2, work.wrapped):
        assert found["ddp"] == (True, True)
        assert found["fsdp"] == found["whole fsdp"] == (True, 6)
        assert found["join"]
        same, graphs = found["compile"]
        assert same and graphs >= 2  # one before the call of the module, one after it


def test_wrappers_around_a_collection_that_trains_its_own_rows() -> None:
    for found in run_ranks(2, work.unsharded_inside):
        wrappers = dict.fromkeys(("eager", "accumulate", "compiled"), "DistributedDataParallel") | {"fsdp": "FSDP"}
        assert found.keys() == wrappers.keys()
        for case, wrapper in wrappers.items():
            kind, text = found[case]
            assert kind == "RuntimeError" and f"inside {wrapper}, which does not know" in text, (case, text)
            assert "ShardedEmbeddingCollection" in text


def test_device_meshes_are_process_groups() -> None:
    for found in run_ranks(4, work.on_meshes):
        assert found["flat"][0] == 4 and found["square"][0] == 2
        assert "rail_vectors" in found["square"][1]
        assert found["deep"][0] == "ValueError" and "mesh of 3 dimensions" in found["deep"][1]
        assert found["nonsense"][0] == "TypeError" and "got str" in found["nonsense"][1]


def test_groups_of_some_ranks_have_their_own_modules() -> None:
    assert run_ranks(4, work.in_two_groups) == [True] * 4


def test_state_dicts_hold_shards_and_resume_bit_for_bit(tmp_path: Path) -> None:
    both = run_ranks(2, work.saved_and_loaded, str(tmp_path))
    states = ("m", "v")
    shapes = [
        {"rows[0::2]": (5, 4), "whole": (7, 4), "columns[:,2:4]": (8, 2), "columns[:,6:8]": (8, 2), "copied": (5, 4)},
        {"rows[1::2]": (4, 4), "columns[:,0:2]": (8, 2), "columns[:,4:6]": (8, 2), "copied": (5, 4)},
    ]
    for rank, (found, of_rank) in enumerate(zip(both, shapes, strict=True)):
        rows = f"tables.tables.rows[{rank}::2].weight"
        expected = {"dense.weight": (2, 2), "dense.bias": (2,)}
        for table, shape in of_rank.items():
            expected |= {f"tables.tables.{table}.{key}": shape for key in ("weight", *(f"optim.{s}" for s in states))}
            expected |= {f"tables.tables.{table}.optim.rule.name": (64,)}
        expected |= {f"tables.{part}optim.{key}": () for part in ("", "replicated.") for key in ("step", "seed")}
        assert found["shapes"] == expected
        assert found["contiguous"] and found["same"] and found["moved"] and found["kept"]
        assert found["steps"] == (6, 6)
        for case, words in {
            "missing": f'Missing key(s) in state_dict: "{rows}"',
            "unexpected": 'Unexpected key(s) in state_dict: "tables.tables.lines.weight"',
            "shape": f"{rows}: shape (2, 4) does not fit this rank's shard of shape",
            "counter": "tables.optim.step: -1 is not allowed",
            "swapped": "holds the shards of rank",
        }.items():
            assert found[case][0] == "RuntimeError" and words in found[case][1], found[case]
        # Older state dicts do not say whose states they hold.
        assert set(found["not strict"]) == {key for key in expected if not key.endswith("rule.name")}
        assert found["row states"] == {
            "weight",
            "s",
            "name",
        }  # without what ranks exchange about rows whose columns they share


def test_moves_and_copies_are_refused_and_casts_ignored() -> None:
    for found in run_ranks(2, work.moved_and_copied):
        assert found["casts"] and found["frozen"] and found["works"]
        for case in ("move", "inside"):
            assert found[case][0] == "RuntimeError" and "stays on the device it was made on (cpu)" in found[case][1]
        for case in ("deepcopy", "copy", "pickle", "save"):
            assert found[case][0] == "TypeError" and "state_dict()" in found[case][1] and "full(" in found[case][1]
