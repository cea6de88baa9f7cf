"""The CUDA launcher on the emulated driver: a refusal of the driver is an error with the reason and a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from embforge.codegen.errors import LaunchError, ToolchainError
from embforge.codegen.targets.cuda.launch import launch_of
from embforge.launch.cuda import kernels as cuda_kernels
from embforge.launch.cuda.errors import REASONS
from embforge.launch.cuda.forward import CudaForward
from embforge.launch.gpu import forward_call
from embforge.verify.cases import Case
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE, PLAN, bad_id, given, given_long, image


def test_a_driver_older_than_the_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with control.setting(version=12090):
        with pytest.raises(ToolchainError, match="update the driver"):
            CudaForward(PLAN, image())
        monkeypatch.setattr(cuda_kernels, "installed_nvrtc", lambda: None)
        CudaForward(PLAN, image())  # kernels made elsewhere: the driver judges them itself


def test_code_for_another_gpu_is_refused(forward: CudaForward) -> None:
    with control.setting(arch=80), pytest.raises(LaunchError) as caught:
        given(Case(4)).call(forward)
    for word in (
        PLAN.uri,
        "cuda:0",
        "made for sm_90",
        "compute capability 8.0",
        "make it for sm_80",
        "NO_BINARY_FOR_GPU",
    ):
        assert word in str(caught.value)


def test_code_for_an_older_minor_runs(forward: CudaForward) -> None:
    with control.setting(arch=91):
        here = given(Case(4))
        here.assert_right(here.call(forward))


@pytest.mark.parametrize("code", [b"nothing that a driver knows", b"\x7fELF" + bytes(100)])
def test_damaged_code_is_refused(code: bytes) -> None:
    with pytest.raises(LaunchError, match=r"damaged or of another version; make it again: .*INVALID_IMAGE"):
        given(Case(4)).call(CudaForward(PLAN, code))


def test_code_without_the_kernel_is_refused(forward: CudaForward) -> None:
    renamed = image().replace(b"_long\0", b"_gone\0")
    assert renamed != image()
    forward = CudaForward(PLAN, renamed)
    given(Case(4)).call(forward)
    with pytest.raises(LaunchError, match=rf"{PLAN.uri}_long on cuda:0: .*CUDA_ERROR_NOT_FOUND"):
        given_long().call(forward)


def test_no_memory_for_the_code_is_an_error_with_a_remedy(forward: CudaForward) -> None:
    here = given(Case(4))
    with control.setting(memory=control.memory_used() + 65536), pytest.raises(LaunchError, match="no memory left"):
        here.call(forward)
    here.assert_right(here.call(forward))


def test_no_memory_for_the_result_is_torchs_error(forward: CudaForward) -> None:
    here = given(Case(300, "one"))
    with control.setting(memory=control.memory_used() + 256), pytest.raises(torch.OutOfMemoryError):
        here.call(forward)
    here.assert_right(here.call(forward))


@pytest.mark.parametrize("change", [{"block": 2048}, {"block": 512}, {"shared": 48000}])
def test_a_launch_that_the_device_cannot_take(
    forward: CudaForward, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    here = given(Case(4))
    forge(monkeypatch, change)
    with pytest.raises(LaunchError, match=r"does not accept \d+ blocks of \d+ threads with \d+ bytes .*smaller block"):
        here.call(forward)


def test_a_device_without_that_much_shared_memory(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, {"shared": 300_000})
    refused = r"cuda:0: the device does not accept .* with 300000 bytes .*\(CUDA_ERROR_INVALID_VALUE: from cuKernelSet"
    with pytest.raises(LaunchError, match=refused):
        given(Case(4)).call(forward)


def forge(monkeypatch: pytest.MonkeyPatch, change: dict[str, int]) -> None:
    """Changes the launch of a call's first kernel."""

    def forged(*words: Any) -> Any:
        work = launch_of(*words)
        return replace(work, kernels=(replace(work.kernels[0], **change), *work.kernels[1:]))

    monkeypatch.setattr(forward_call, "launch_of", forged)


def test_a_kernel_that_goes_wrong_spoils_the_device(forward: CudaForward) -> None:
    """As on a GPU: no call fails until one waits for the device, and from then on every call fails."""
    good = given(Case(4, "one"))
    good.call(forward, "unchecked")
    bad_id(1000).call(forward, "unchecked")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        torch.cuda.synchronize(DEVICE)
    assert "out-of-bounds" in control.report()
    assert PLAN.uri in control.report()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        forward.check()
    control.restart()


def test_a_launch_after_a_kernel_went_wrong_says_so(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    good = given(Case(4, "one"))
    good.call(forward, "unchecked")
    bad_id(1000).call(forward, "unchecked")
    launch = forward._core.launch

    def late(*words: Any) -> None:
        control.finish()  # the device comes to the bad id between torch's look at it and the launch
        launch(*words)

    monkeypatch.setattr(forward._core, "launch", late)
    with pytest.raises(LaunchError, match=r"failed earlier.*CUDA_LAUNCH_BLOCKING=1.*\(CUDA_ERROR_ILLEGAL_ADDRESS"):
        good.call(forward, "unchecked")
    control.restart()


def test_an_unknown_error_blames_no_cause(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    good = given(Case(4, "one"))
    good.call(forward)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch_cuda.Stream(0x5EED))
    with pytest.raises(
        LaunchError, match=r"the driver refused to load or launch .*\(CUDA_ERROR_INVALID_HANDLE"
    ) as caught:
        good.call(forward)
    assert "earlier" not in str(caught.value)


def test_every_error_with_a_reason_is_one_of_the_drivers() -> None:
    assert set(REASONS) <= set(driver.CUresult.__members__)


def test_other_errors_keep_the_message_of_the_driver(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward._core, "launch", lambda *words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        given(Case(4)).call(forward)
