"""torch.distributed.checkpoint saves and loads sharded collections, and refuses what it cannot load."""

from __future__ import annotations

from pathlib import Path

from support.sharded import checkpoint_ranks as work
from support.sharded.ranks import run_ranks


def test_a_round_trip_restores_every_kind_of_shard(tmp_path: Path) -> None:
    for size in (2, 3):
        folder = str(tmp_path / str(size))
        for found in run_ranks(size, work.round_trip, folder):
            assert found == {"different": True, "same": True, "goes on": True, "names": True}
    for found in run_ranks(3, work.elsewhere, str(tmp_path / "2")):
        assert "Missing key in checkpoint state_dict: m.tables.modulo[" in found["ranks"]
        assert found["untouched"]
        assert "Missing key in checkpoint state_dict: m.tables.modulo[" in found["plan"]
        kind, words = found["sentence"]
        assert kind == "RuntimeError" and "has tables.modulo[0::7].weight instead" in words and "load_full" in words
