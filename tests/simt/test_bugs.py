"""Every kind of bug that the executor looks for is found in a small kernel that has it; correct kernels pass."""

from __future__ import annotations

import re

import numpy
import pytest
from running import HERE, Buffer, Run, aligned, image_of, launch

from embforge.codegen.targets.cuda.nvrtc import compile_cubin
from embforge.codegen.targets.simt.image import kernels_in
from embforge.launch.simt.report import bug_of

TEXT = (HERE / "bugs.cu").read_text()
LINES = TEXT.split("\n")
KERNELS = [kernel.name for kernel in kernels_in(TEXT)]
SOUND = [name for name in KERNELS if name.startswith("sound_")]
OTHERS = ("lost_tail", "endless_recursion", "divergent_barrier_in_a_function")
"""Kernels whose bug has no single line; each has a test of its own below."""
BUGGY = [name for name in KERNELS if name not in SOUND and name not in OTHERS]
ZEROED = ("endless", "endless_with_syncwarp", "plain_read_of_an_atomic", "atomic_after_a_plain_write")
"""Kernels that may read what they have not written."""
SIZE, BLOCK, GRID = 128, 64, 2
DYNAMIC_SHARED = 128


def place_of(kernel: str) -> tuple[int, str]:
    """The line of a kernel's bug, and its kind."""
    begin = next(i for i, line in enumerate(LINES) if f" {kernel}(" in line)
    for number, line in enumerate(LINES[begin:], begin + 1):
        if found := re.search(r"// BUG ([\w-]+)", line):
            return number, found[1]
        assert line != "}", f"{kernel} marks no bug"
    raise AssertionError(kernel)


def run(kernel: str, seed: int = 0, count: bool = False) -> Run:
    buffers = {
        "in": Buffer(numbers(), writable=False),
        "out": Buffer(aligned(SIZE), fresh=kernel not in ZEROED),
    }
    image = image_of(TEXT, "bugs.cu")
    return launch(
        image, kernel, buffers, [SIZE], grid=(GRID,), block=(BLOCK,), shared=DYNAMIC_SHARED, seed=seed, count=count
    )


def numbers() -> numpy.ndarray[tuple[int], numpy.dtype[numpy.float32]]:
    values = aligned(SIZE)
    values[:] = numpy.arange(SIZE)
    return values


@pytest.mark.parametrize("count", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("kernel", BUGGY)
def test_a_bug_is_found_at_its_line(kernel: str, count: bool) -> None:
    line, kind = place_of(kernel)
    found = run(kernel, count=count)
    assert found.report is not None, "not found"
    assert found.kind == kind, found.report.message
    message = str(bug_of(found.report, found.image.path, TEXT, seed=0))
    assert f"kernel {kernel}: {kind}: " in message
    assert re.search(r"block \d+, thread \d+, bugs\.cu:\d+", message), message
    named = {frame.line for frame in found.frames()}
    if kind == "race":  # it is reported at the second of the two accesses, which may be either
        named |= {frame.line for frame in found.earlier_frames()}
    assert line in named, message
    assert LINES[line - 1].strip() in message


@pytest.mark.parametrize("kernel", SOUND)
def test_a_sound_kernel_has_no_bug_in_any_schedule(kernel: str) -> None:
    for seed in range(8):
        for count in (False, True):
            found = run(kernel, seed, count)
            assert found.report is None, bug_of(found.report, found.image.path, TEXT, seed)


def test_results_that_no_thread_wrote_are_known() -> None:
    found = run("lost_tail")
    assert found.report is None
    assert found.defined["out"][:-4].all() and not found.defined["out"][-4:].any()


def test_endless_recursion_is_a_stack_overflow() -> None:
    found = run("endless_recursion")
    assert found.kind == "stack-overflow"
    assert "deep" in {frame.function for frame in found.frames()}


def test_one_barrier_reached_from_two_callers_is_divergent() -> None:
    found = run("divergent_barrier_in_a_function")
    assert found.kind == "divergent-barrier"
    callers = {frame.line for frame in (*found.frames(), *found.earlier_frames())}
    assert len(callers) >= 3  # the barrier, and both places that call it


def test_the_other_thread_of_a_race_is_named() -> None:
    found = run("racing_blocks")
    assert found.report is not None and found.report.has_other
    here, earlier = found.report.place, found.report.other
    assert tuple(here.thread) == tuple(earlier.thread) and tuple(here.block) != tuple(earlier.block)


def test_the_buggy_kernels_compile_as_cuda() -> None:
    """A kernel that NVRTC refuses would prove nothing about CUDA."""
    assert compile_cubin(HERE / "bugs.cu", "sm_90")
