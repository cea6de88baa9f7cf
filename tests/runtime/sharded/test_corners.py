"""Corner cases of sharded training in which ranks could differ: what each of them holds, skips or counts."""

from __future__ import annotations

from typing import Any

import pytest
from support.sharded import corner_ranks as corners
from support.sharded.ranks import run_ranks


@pytest.fixture(scope="module", params=[2])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, corners.everything)


def of(found: list[dict[str, Any]], work: Any) -> list[Any]:
    return [rank[work.__name__] for rank in found]


def test_rows_are_reduced_over_all_pieces_of_their_columns(found: list[dict[str, Any]]) -> None:
    for apart in of(found, corners.row_rules_on_pieces_of_one_rank):
        assert max(apart.values()) < 1e-6, apart


def test_features_of_a_fused_table_keep_their_padding(found: list[dict[str, Any]]) -> None:
    assert all(row == [3.0] * corners.DIM for row in of(found, corners.padding_of_a_fused_table))


def test_an_overflow_on_the_wire_skips_the_update_everywhere(found: list[dict[str, Any]]) -> None:
    assert all(one == (True, 2.0**15) for one in of(found, corners.gradients_that_overflow_on_the_wire))


def test_a_spoilt_pass_spoils_the_step(found: list[dict[str, Any]]) -> None:
    assert all(one == [(1.0, 2.0)] * 2 for one in of(found, corners.a_spoilt_pass_among_accumulated_ones))


def test_gradients_of_weights_are_the_ranks_own(found: list[dict[str, Any]]) -> None:
    assert all(one == [[4.0, 4.0]] * 6 for one in of(found, corners.gradients_of_weights_are_not_averaged))


def test_rows_that_changed_are_not_used(found: list[dict[str, Any]]) -> None:
    assert all("another backward" in text for text in of(found, corners.weights_after_rows_have_changed))
    assert all("recomputed forward" in text for text in of(found, corners.recomputed_forwards))


def test_queries_for_gradients_update_nothing(found: list[dict[str, Any]]) -> None:
    assert all(of(found, corners.queries_for_gradients_of_weights)[0])
    assert len({tuple(rows) for rows in of(found, corners.queries_for_gradients_of_weights)}) == 1


def test_an_unknown_scaler_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    assert all("use_grad_scaler" in text for text in of(found, corners.losses_scaled_by_an_unknown_scaler))


def test_a_batch_that_changes_before_the_backward_is_refused(found: list[dict[str, Any]]) -> None:
    for texts in of(found, corners.a_batch_that_changes_before_the_backward):
        assert len(texts) == 2 and all("modified by an inplace operation" in text for text in texts)


def test_padding_that_is_no_row_is_absent(found: list[dict[str, Any]]) -> None:
    assert of(found, corners.padding_that_is_no_row) == [[]] * len(found)


def test_calls_between_prefetched_batches(found: list[dict[str, Any]]) -> None:
    assert of(found, corners.calls_between_prefetched_batches) == [40] * len(found)


def test_a_batch_belongs_to_the_module_that_distributed_it(found: list[dict[str, Any]]) -> None:
    for text in of(found, corners.a_batch_of_another_module):
        assert "distributed by another module" in text and text.endswith(f"; {float(corners.DIM)}")


def test_the_default_dtype_changes_nothing(found: list[dict[str, Any]]) -> None:
    assert of(found, corners.other_default_dtypes) == [[]] * len(found)


def test_a_step_without_gradients_is_not_counted(found: list[dict[str, Any]]) -> None:
    for replicated, spread in of(found, corners.steps_without_gradients):
        assert replicated[1] == spread[1] == 1
        assert replicated[0] == pytest.approx(spread[0]) == pytest.approx(0.9)


def test_passes_with_all_tables_frozen_count_no_step(found: list[dict[str, Any]]) -> None:
    for steps, wants_gradients in of(found, corners.all_tables_frozen):
        assert not any(steps) and not wants_gradients


def test_a_lack_of_memory_on_one_rank_raises_on_all(found: list[dict[str, Any]]) -> None:
    assert of(found, corners.no_memory_on_one_rank) == ["MemoryError", "RankError"][: len(found)]


def test_groups_have_the_timeout_of_the_passed_group(found: list[dict[str, Any]]) -> None:
    assert all(of(found, corners.timeouts))


def test_a_module_is_freed_when_it_is_dropped(found: list[dict[str, Any]]) -> None:
    assert of(found, corners.a_dropped_module) == [[True] * 3] * len(found)


def test_states_of_another_optimizer_are_refused(found: list[dict[str, Any]]) -> None:
    for texts in of(found, corners.states_of_another_rule):
        assert len(texts) == 2
        assert all("states of the optimizer 'adam/1', the module's is 'lamb/1'" in text for text in texts)


def test_hierarchical_gradients_in_two_bytes() -> None:
    for whole, *narrow in run_ranks(2, corners.hierarchical_gradients_in_two_bytes, "reference"):
        assert all(whole == one for one in narrow)


@pytest.mark.soak
def test_rows_after_an_odd_number_of_columns_on_the_emulated_gpu() -> None:
    for equal, trained in run_ranks(2, corners.rows_after_an_odd_number_of_columns, "simt"):
        assert equal and trained == 12.0 - 2.0


def test_optimizers_by_table(found: list[dict[str, Any]]) -> None:
    """Gradients of two ranks are added: 2 for each row. In the second step the groups have rates of a half, 1 and a
    half."""
    size = len(found)
    for one in of(found, corners.optimizers_by_table):
        here, there, rows, copies, fixed = one["rows"]
        assert here == copies == 1 - size * 1.0 - size * 0.5 and rows == 1 - size * 0.25 and fixed == 1
        assert there == pytest.approx(1 - 1 - 0.5**0.5, abs=1e-6)
        assert one["groups"] == [
            ("here, copies", ("here", "copies"), 0.5), ("there", ("there",), 1.0), ("*", ("rows",), 0.5)
        ]  # fmt: skip
        assert one["states"] == {"here": [], "there": ["s"], "rows": [], "copies": [], "fixed": []}
        assert one["loaded"] == [1 - size, pytest.approx(0, abs=1e-6), 1 - size * 0.25, 1 - size, 1]
        assert one["unchanged"]
        assert "table 'fixed': its optimizer is None" in one["refused"][0]
        assert "1 parameter groups; allowed: 3" in one["refused"][1]
    keys = ["tables.there.optim.rule.name", "tables.there.optim.s"]
    assert [one["keys"] for one in of(found, corners.optimizers_by_table)] == [[], keys]


def test_tables_of_one_width_have_one_optimizer(found: list[dict[str, Any]]) -> None:
    size = len(found)
    for said, rows in of(found, corners.fused_tables_with_optimizers):
        assert "optimizer: tables 'a' and 'b' have the same width and dtype" in said
        assert rows == [-0.5 * size, -0.5 * size, -1.0 * size]
