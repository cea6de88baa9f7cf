"""If something fails on one rank, all ranks raise together and soon, nothing changes, and the module still works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sharded import fault_ranks as work
from support.sharded.ranks import run_ranks, start_ranks

SOON = 300.0
"""Seconds: more than SHORT, and less than LONG and the timeout of the outer group."""


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.int64), ("cpu", torch.int32)])
def test_a_bad_id_is_reported_on_every_rank(backend: str, dtype: torch.dtype) -> None:
    found = run_ranks(2, work.bad_ids, backend, dtype)
    for of_rank in found:
        for key, (kind, words) in of_rank["expected"].items():
            assert kind == "IndexError" and key.split()[1] in words
            assert of_rank["errors"][key] == ("IndexError", f"rank 1: {words}")
        assert set(of_rank["counters"]) == {"header"}  # neither ids nor vectors have been sent
        assert of_rank["same"] and of_rank["afterwards"]


def test_wrong_arguments_of_one_rank_stop_all() -> None:
    found = run_ranks(3, work.bad_arguments)
    for name in (key for key in found[0] if key not in ("counters", "afterwards")):
        by_rank = [of_rank[name] for of_rank in found]
        at_fault = by_rank[0][0]
        for rank, (_, (kind, words)) in enumerate(by_rank):
            if rank == at_fault:
                assert kind in ("TypeError", "ValueError"), (name, kind, words)
                assert "the output of that rank" not in words
            else:
                assert kind in ("RankError", "ValueError") and f"rank {at_fault}:" in words, (name, kind, words)
                assert "the output of that rank" in words
    assert all(set(of_rank["counters"]) == {"header"} and of_rank["afterwards"] for of_rank in found)


def test_a_kernel_that_one_rank_cannot_build_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, work.no_kernel, str(tmp_path), timeout=SOON)
    assert first["error"][0] == "RankError" and "rank 1: its batch was refused" in first["error"][1]
    assert second["error"][0] == "MissingKernelError" and "EMBFORGE_JIT=0" in second["error"][1]
    for of_rank in (first, second):
        assert set(of_rank["counters"]) == {"header"} and of_rank["same"]
        assert of_rank["afterwards"] == ("nothing", "")


def test_modules_do_not_depend_on_other_groups() -> None:
    found = run_ranks(3, work.groups)
    for of_rank in found[:2]:
        kind, words = of_rank["unequal"]
        assert kind == "RankError" and "process groups" in words and "the same number of groups" in words
        assert of_rank["equal"]
    assert found[2] == {}


def test_a_modules_groups_have_the_passed_groups_backend() -> None:
    for of_rank in run_ranks(2, work.other_backend):
        assert of_rank["own"] == "cpu:gloo"
        kind, words = of_rank["device"]
        assert kind == "ValueError" and "no collectives for device 'cpu'" in words


def test_nodes_are_what_torchrun_says_of_all_of_them() -> None:
    for rank, of_rank in enumerate(run_ranks(4, work.nodes)):
        assert of_rank["equal"] == 2 and of_rank["unequal"] == 4
        assert of_rank["every other"] == (2 if rank in (0, 2) else None)


def test_a_rank_that_cannot_make_the_module_stops_all() -> None:
    first, second = run_ranks(2, work.unmade, timeout=SOON)
    assert second["memory"][0] == "PlanError" and second["formats"][0] == "TypeError"
    for kind, words in first.values():
        assert kind == "RankError" and "rank 1: its arguments were refused" in words


def test_bounds_check_zero_takes_bad_ids_as_absent() -> None:
    assert run_ranks(2, work.zero_bounds) == [(True, True)] * 2


@pytest.mark.parametrize("when", ["vectors", "backward"])
def test_a_killed_rank_makes_the_others_fail(when: str) -> None:
    found = start_ranks(3, work.killed, when, timeout=SOON)
    assert found[1] == (False, "died with exit code -9")
    for good, answer in (found[0], found[2]):
        assert good, answer
        kind, words = answer
        assert kind == "RankError" and "another rank died" in words, answer


def test_a_rank_that_never_makes_the_module_makes_the_others_fail() -> None:
    found = run_ranks(2, work.never_made, timeout=SOON)
    assert found[1] == ("nothing", "")
    assert found[0][0] == "RankError" and "timeout" in found[0][1], found[0]


def test_a_rank_that_stops_calling_makes_the_others_fail() -> None:
    found = run_ranks(2, work.stops_calling, timeout=SOON)
    quiet, (kind, words) = found[1], found[0]
    assert quiet == ("nothing", "")
    assert kind == "RankError" and "'header'" in words and "timeout" in words


def test_ranks_without_samples_take_part() -> None:
    assert run_ranks(3, work.no_samples) == [True] * 3


def test_ranks_out_of_step_are_named() -> None:
    found = run_ranks(3, work.out_of_step)
    for rank, of_rank in enumerate(found):
        kind, words = of_rank["calls"]
        assert kind == "RankError" and "rank 1 makes call 2, rank 0 call 3" in words
        kind, words = of_rank["gradients"]
        assert kind == "RankError" and f"rank {rank} calls with gradients {'off' if rank == 1 else 'on'}" in words
        assert of_rank["afterwards"] == ("nothing", "")


def test_ranks_that_make_different_modules_are_named() -> None:
    found = run_ranks(2, work.mismatches)
    says = {
        "spec": "spec.table[rows].num_embeddings is 9 on rank 0, 10 on rank 1",
        "table": "is 'rows' on rank 0, 'lines' on rank 1",
        "plan": "plan.rows.by is 'modulo' on rank 0, 'block' on rank 1",
        "plan of other tables": "on rank 0, None on rank 1",
        "optimizer": "optimizer: ranks differ",
        "lr": "optimizer.lr is 0.1 on rank 0, 0.2 on rank 1",
        "eps": "is 1e-10 on rank 0, 0.001 on rank 1",
        "lr of a table": "optimizer.rows.lr is 0.1 on rank 0, 0.2 on rank 1",
        "order of entries": "optimizer.rows.group is 0 on rank 0, 1 on rank 1",
        "accumulate": "accumulate is False on rank 0, True on rank 1",
        "average_gradients": "average_gradients is False on rank 0, True on rank 1",
        "duplicates": "duplicates is 'keep' on rank 0, 'merge' on rank 1",
        "formats": "formats.forward is 'fp16' on rank 0, 'bf16' on rank 1",
        "bounds_check": "bounds_check is 'error' on rank 0, 'zero' on rank 1",
        "node_size": "node_size is 2 on rank 0, 1 on rank 1",
    }
    refused = {"misspelt table", "no optimizer", "torch's optimizer", "no plan", "unknown word"}
    assert set(found[0]) == set(says) | refused | {"the same"}
    for name, words in says.items():
        assert found[0][name] == found[1][name]
        assert found[0][name][0] == "RankError" and words in found[0][name][1], found[0][name]
    for name in refused:
        assert found[0][name][0] == "RankError" and "rank 1: its arguments were refused" in found[0][name][1]
        assert found[1][name][0] in ("TypeError", "ValueError") and "its own output" not in found[1][name][1]
    assert found[0]["the same"] == found[1]["the same"] == ("nothing", "")


@pytest.mark.parametrize("trains", [True, False])
def test_uneven_numbers_of_steps_through_join(trains: bool) -> None:
    assert run_ranks(3, work.uneven, trains) == [(True, 1), (True, 2), (True, 3)]


def test_what_join_cannot_do_is_refused() -> None:
    for waits, ahead in run_ranks(2, work.refused_in_join):
        assert waits[0] == "ValueError" and "accumulate=True" in waits[1]
        assert ahead[0] == "ValueError" and "PrefetchedBatches inside of Join" in ahead[1]


def test_a_bad_batch_among_prefetched_ones_raises_in_its_turn() -> None:
    for (kind, words), seen, goes_on in run_ranks(2, work.prefetched):
        assert kind == "IndexError" and "rank 0: feature 'sum': id 99" in words
        assert seen == 1 and goes_on


def test_failed_calls_keep_no_memory() -> None:
    for errors, more, gone in run_ranks(2, work.released):
        assert [kind for kind, _ in errors] == ["IndexError"] * 4
        assert more == 0 and all(gone)
