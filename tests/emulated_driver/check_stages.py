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

from embforge.codegen.build import build
from embforge.codegen.errors import LaunchError
from embforge.codegen.stages import StagePlan
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE

PLAN = StagePlan("cuda", "sm_90", *USUAL)
CASE = Case(
    (Feature(40, "mean", (Split(3),), weighted=True), Feature(40, "none", (Split(2),))),
    ((3, 0, 70, 1), (5, 2, 0, 9)),
    merge=1,
)
OTHER = replace(CASE, seed=7)
RESULTS = ("lengths", "slots", "divisors", "header", "mistake")


@pytest.fixture
def stages() -> Any:
    """A launcher that nobody has used yet."""
    from embforge.launch.stages_cuda import CudaStages  # now: another one may have been put there

    return CudaStages(PLAN, build(replace(PLAN, target="simt")).binary.read_bytes())  # type: ignore[arg-type]


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
        assert torch.equal(stage_cases.bits(getattr(want, name)), stage_cases.bits(getattr(have, name))), name


def test_a_call_does_not_wait_and_runs_in_the_current_stream(stages: Any) -> None:
    with torch_cuda.side_stream(DEVICE):
        here = stage_cases.bucketed(CASE, USUAL, DEVICE)
        torch_cuda.synchronize(DEVICE)
        before = control.launches()
        stage_cases.count(stages, here)
        assert control.launches() == before + 8
        with torch.cuda.device(DEVICE):
            torch_cuda.Stream(0).synchronize()  # another stream than that of the call
        lengths: Any = here.lengths
        assert bool((lengths.inner == stage_cases.FILLER).all())
        assert_counted(here, CASE)


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


def test_a_kernel_that_the_driver_refuses(stages: Any) -> None:
    here = stage_cases.bucketed(CASE, USUAL, DEVICE)
    damaged = type(stages)(PLAN, b"no image")
    with pytest.raises(LaunchError, match="count_borders on cuda:0: the kernel's file is damaged"):
        stage_cases.count(damaged, here)


def test_arguments_that_are_not_the_stages(stages: Any) -> None:
    words = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="stage regroup takes"):
        stages.run("regroup", words=words, values=words)
