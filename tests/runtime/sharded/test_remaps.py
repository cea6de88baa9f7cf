"""Sharded modules with remapped tables: every rank turns its ids into rows before they travel."""

from __future__ import annotations

import pytest
from support.sharded import remap_ranks as work
from support.sharded.ranks import run_ranks


@pytest.mark.parametrize(("size", "backend"), [(2, "cpu"), (3, "reference")])
def test_results_and_training_are_those_of_rows(size: int, backend: str) -> None:
    for found in run_ranks(size, work.same_as_rows, backend):
        assert found == {"results": True, "rows": True}


def test_state_and_mistakes() -> None:
    for rank, found in enumerate(run_ranks(2, work.state_and_mistakes)):
        assert "which rows its 21 ids have is not known yet" in found["unknown entries"]
        assert found["keys"] == [f"tables.{name}.remap.entries" for name in ("copied", "rows", "whole")]
        assert found["loaded"]
        assert "tables.rows.remap.entries: remap of table 'rows': entry 0 is 99; allowed" in found["bad load"]
        assert found["untouched"]
        assert found["buffers"] == []  # DistributedDataParallel would send them in every step
        assert ("remap: got list" if rank else "its arguments were refused") in found["a list"]
        assert found["unchanged"]
        assert found["unknown id"].startswith(
            "IndexError: rank 1: feature 'sum': id -5 of sample 0, position 0 is not an"
        )
        assert "remap: ranks differ" in found["others"]
        assert ("shape (20,); allowed: (21,)" if rank else "its arguments were refused") in found["refused"]
        assert "table 't': remap=9 is not allowed here, because tables of the same width" in found["fused"]
        assert found["plan"]


def test_entries_that_differ_after_construction_are_refused_on_all_ranks() -> None:
    for rank, found in enumerate(run_ranks(3, work.differences_after_construction)):
        other = "on rank 2 are not those of rank 0, so equal ids would have different rows"
        assert f"RankError: remap: ranks differ: the entries of table 'rows' {other}" in found["set"]
        assert "Call set_remap(table, entries) with the same entries on every rank" in found["set"]
        assert f"the entries of tables 'rows', 'whole' {other}" in found["written"]
        assert f"the entries of table 'copied' {other}" in found["loaded"]
        assert found["set again"] and found["loaded again"] and found["rows"]
        assert f"the entries of table 'rows' {other}" in found["with a bad id"]
        assert ("values: " if rank == 2 else "its batch was refused") in found["with no batch"]


def test_digests_are_computed_when_entries_change() -> None:
    assert run_ranks(2, work.digests_are_kept) == [[3, 1]] * 2


def test_a_header_has_a_word_for_each_remapped_table() -> None:
    for remapped, plain in run_ranks(2, work.header_bytes_sent):
        assert remapped == plain + 8 * len(work.ENTRIES)
