"""The launcher of the stages between ranks, through the real cuda.core, on the emulated driver: streams, graphs.

What the stages compute is compared by the conformance suite, whose rows for CUDA run on the emulated driver too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance import stage_cases
from conformance.stage_cases import USUAL, Bucketed, Case, Feature, Split

from embforge.codegen.errors import LaunchError
from embforge.codegen.stages import StagePlan
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE, image

PLAN = StagePlan("cuda", "sm_90", *USUAL)
CASE = Case(
    (Feature(40, "mean", (Split(3),), weighted=True), Feature(40, "none", (Split(2),)), Feature(2, "sum", (Split(1),))),
    ((3, 0, 70, 1), (5, 2, 0, 9), (1, 1, 0, 1)),
    merge=1,
    asks=True,
)
"""Three bags of one id, at least two of which are equal."""
OTHER = replace(CASE, seed=7)
RESULTS = ("lengths", "slots", "pools", "divisors", "header", "mistake")


@pytest.fixture
def stages() -> Any:
    """A launcher that has not been used yet."""
    from embforge.launch.cuda.stages import CudaStages  # now: another one may have been put there

    return CudaStages(PLAN, image(PLAN))


@pytest.fixture(autouse=True)
def _working_driver() -> Iterator[None]:
    yield
    torch_cuda.synchronize(DEVICE)
    assert not control.report()


def counted(case: Case) -> Bucketed:
    """What the kernels' twin on the CPU says, by the executor."""
    result = stage_cases.bucketed(case, USUAL)
    stage_cases.count(stage_cases.loaded("simt", USUAL), result)
    return result


def assert_counted(have: Bucketed, case: Case) -> None:
    want = counted(case)
    for name in RESULTS:
        if getattr(want, name) is not None:
            assert torch.equal(stage_cases.bits(getattr(want, name)), stage_cases.bits(getattr(have, name))), name


@pytest.mark.parametrize(("asks", "launches"), [(True, 9), (False, 8)])
def test_a_call_does_not_wait_and_runs_in_the_current_stream(stages: Any, asks: bool, launches: int) -> None:
    case = replace(CASE, asks=asks)
    with torch_cuda.side_stream(DEVICE):
        here = stage_cases.bucketed(case, USUAL, DEVICE)
        torch_cuda.synchronize(DEVICE)
        before = control.launches()
        stage_cases.count(stages, here)
        assert control.launches() == before + launches
        with torch.cuda.device(DEVICE):
            torch_cuda.Stream(0).synchronize()  # another stream than that of the call
        lengths: Any = here.lengths
        assert bool((lengths.inner == stage_cases.FILLER).all())
        assert_counted(here, case)


def test_every_device_has_kernels_of_its_own(stages: Any) -> None:
    for device in (DEVICE, torch.device("cuda", 1)):
        here = stage_cases.bucketed(CASE, USUAL, device)
        stage_cases.count(stages, here)
        assert_counted(here, CASE)


def test_a_captured_count_is_replayed_on_other_ids(stages: Any) -> None:
    with torch_cuda.side_stream(DEVICE):
        here = stage_cases.bucketed(CASE, USUAL, DEVICE)
        with torch_cuda.Graph(DEVICE).capture(), pytest.raises(RuntimeError, match="once before capturing"):
            stage_cases.count(stages, here)
        stage_cases.count(stages, here)
        graph = torch_cuda.Graph(DEVICE)
        with graph.capture():
            stage_cases.count(stages, here)
        for case in (OTHER, CASE):
            now = stage_cases.bucketed(case, USUAL)
            for name in ("values", "weights"):
                here.given[name].copy_(now.given[name])
            graph.replay()
            assert_counted(here, case)


def test_requested_pools_are_gathered_by_several_blocks(stages: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (100, 80), generator=generator, dtype=torch.uint8)
    asked = torch.randint(0, 90, (700,), generator=generator, dtype=torch.int32)
    picks = [[10, 16, 64, 0, 600, 0], [0, 2, 6, 600, 100, 600 * 64]]  # in the widest vectors, and in the narrowest
    parts = [
        rows[row:, byte : byte + size][asked[first : first + count].long()].flatten()
        for row, byte, size, first, count, _ in picks
    ]
    with torch_cuda.side_stream(DEVICE):
        picked = torch.zeros(sum(part.numel() for part in parts), dtype=torch.uint8, device=DEVICE)
        there = {"picks": torch.tensor(picks), "words": asked, "rows": rows}
        moved = {name: tensor.to(DEVICE) for name, tensor in there.items()}
        before = control.launches()
        stages.run("gather", **moved, picked=picked, num_picks=len(picks), row_bytes=80)
        assert control.launches() == before + 1
        assert torch.equal(picked.cpu(), torch.cat(parts))


def test_a_kernel_that_the_driver_refuses_is_an_error(stages: Any) -> None:
    here = stage_cases.bucketed(CASE, USUAL, DEVICE)
    damaged = type(stages)(PLAN, b"no image")
    with pytest.raises(LaunchError, match="count_borders on cuda:0: the kernel's file is damaged"):
        stage_cases.count(damaged, here)


def test_wrong_arguments_of_a_stage_are_refused(stages: Any) -> None:
    words = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="stage regroup takes"):
        stages.run("regroup", words=words, values=words)
