"""A pytest plugin: every test finds emulated devices that work, and SIMT images where cubins would be built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from embforge.codegen import build
from embforge.codegen.plan import Plan
from emulated_driver import control
from emulated_driver.cases import PLAN, image
from emulated_driver.torch_device import emulated
from emulated_driver.trained import BACKWARD, REDUCE, WEIGHTS


def _build_image(plan: Plan, *, kernels: Path | None = None, **more: Any) -> build.Built:
    stands_in = replace(plan, target="simt") if plan.target == "cuda" else plan
    return replace(build.build(stands_in, kernels=kernels, **more), plan=plan)


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(emulated())
    stack.enter_context(mock.patch("embforge.launch.building.build", _build_image))
    config.add_cleanup(stack.close)


@pytest.fixture
def forward() -> Any:
    """A launcher that has not been used yet."""
    from embforge.launch.cuda.forward import CudaForward  # now: mutants.py may have put another one there

    return CudaForward(PLAN, image())


@pytest.fixture
def backward() -> Any:
    from embforge.launch.cuda.backward import CudaBackward

    return CudaBackward(BACKWARD, image(BACKWARD))


@pytest.fixture
def reduce() -> Any:
    from embforge.launch.cuda.backward import CudaReduce

    return CudaReduce(REDUCE, image(REDUCE))


@pytest.fixture
def weight_gradient() -> Any:
    from embforge.launch.cuda.backward import CudaWeightGradient

    return CudaWeightGradient(WEIGHTS, image(WEIGHTS))


@pytest.fixture(autouse=True)
def no_kernel_went_wrong() -> Iterator[None]:
    """Fails a test that launched a kernel with a bug. A test that does so on purpose calls `control.restart()`."""
    yield
    control.finish()
    said = control.report()
    control.restart()
    assert not said, said
