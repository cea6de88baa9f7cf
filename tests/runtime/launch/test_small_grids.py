"""Kernels whose grids have a limit, with a limit of one block, so that its loop does all of the work.

No batch of a test is large enough for the real limits. The tests here repeat tests that exist for grids of any size;
results must have the reference's bits again.
"""

from __future__ import annotations

import pytest
import test_simt_backward as backward
from conformance import test_bits as forward
from support.training import batch_of, compare, plan_of

from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cuda import backward_launch as cuda_backward_launch
from embforge.codegen.targets.cuda import launch as cuda_launch
from embforge.codegen.targets.cuda.backward import backward_shape_of
from embforge.codegen.targets.cuda.backward_launch import backward_launch
from embforge.codegen.targets.cuda.launch import UNIT, launch_of, shape_of
from embforge.verify.cases import Case


@pytest.fixture(autouse=True)
def _one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "LONG_BLOCKS", 1)
    monkeypatch.setattr(cuda_backward_launch, "MOST_BLOCKS", 1)


def test_limits_are_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    update = plan_of(backward.ONE, builtin.sgd())
    lookup = Plan("forward", "simt", "sm_90", "int64", backward.ONE, CudaParams())

    def grids() -> list[int]:
        made = backward_launch(backward_shape_of(update), 5000, 100 * UNIT, 0)
        kernels = launch_of(shape_of(lookup), 5000, 100 * UNIT).kernels
        return [launch.grid for launch in (made.rows, *made.levels[:2], made.before_sort[1], *kernels[1:])]

    assert set(grids()) == {1}
    monkeypatch.undo()
    assert min(grids()) > 1


@pytest.mark.parametrize("part", [slice(3), slice(3, None)], ids=["sums", "others"])
def test_lookups_of_long_bags(part: slice) -> None:
    """Half of the features: one block does all of the work, and the executor ends a block that runs too long."""
    spec = CollectionSpec(forward.LONG.tables, forward.LONG.features[part])
    forward.check(spec, "simt", Case(3, "long", bad_ids=True), 2, special=False)


def test_rows_of_every_number_of_occurrences() -> None:
    compare(plan_of(backward.ONE, builtin.sgd()), batch_of(backward.RUNS, backward.torch.int64))


def test_updates_of_all_poolings_and_dtypes() -> None:
    backward.test_all_poolings_and_dtypes_have_the_references_bits(builtin.adam(), "fp32", "sm_90", "int64")
    backward.test_all_poolings_and_dtypes_have_the_references_bits(builtin.rowwise_adagrad(), "bf16", "sm_75", "int32")


def test_reductions_of_all_poolings_and_dtypes() -> None:
    backward.test_reductions_have_the_references_bits("bf16", "int32")
