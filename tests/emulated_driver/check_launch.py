"""The CUDA launcher as it is, through the real cuda.core, on the emulated driver."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embforge.cases import Case
from embforge.codegen.errors import LaunchError, ToolchainError
from embforge.codegen.targets.cuda_launch import launch_of, shape_of
from embforge.launch import cuda, forward_call
from embforge.launch.cuda import CudaForward
from embforge.launch.metadata import metadata_of
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE, PLAN, Given, given, given_long, image

CASES = {
    "usual": Case(33),
    "around the chunk": Case(9, "edges"),
    "one-hot": Case(300, "one"),
    "no ids": Case(5, "none"),
    "no weights": Case(17, weights="absent"),
    "long bags": Case(3, "deep"),
}


@pytest.fixture
def forward() -> CudaForward:
    return CudaForward(PLAN, image())


def untouched(tensor: Any) -> bool:
    """Whether nobody has written to fresh device memory yet."""
    return bool((tensor.inner.view(torch.uint8) == 0xEB).all())


# ---- Results


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_references_bits(forward: CudaForward, name: str) -> None:
    here = given(CASES[name], special=True)
    here.assert_right(here.call(forward))
    forward.check()


def test_bad_ids_are_absent_in_zero_mode(forward: CudaForward) -> None:
    here = given(Case(33, bad_ids=True))
    for _ in range(3):
        here.assert_right(here.call(forward, "zero"), "zero")
    forward.check()


def test_many_calls_in_a_row_do_not_disturb_each_other(forward: CudaForward) -> None:
    several = [given(Case(4)), given_long(), given(Case(9, "edges")), given_long(seed=1)]
    results = [here.call(forward) for here in several]
    for here, result in zip(several, results, strict=True):
        here.assert_right(result)


def test_an_empty_batch_launches_nothing(forward: CudaForward) -> None:
    before, here = control.launches(), given(Case(0))
    pooled, sequence = here.call(forward)
    assert pooled.shape == (0, PLAN.layout.output_width)
    assert sequence is not None
    assert sequence.shape == (0,)
    assert control.launches() == before
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets: values has 3 ids"):
        with_batch(here, values=ids).call(forward)


def test_a_batch_past_what_a_grid_holds_is_refused(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_call, "MOST_BLOCKS", 1)
    with pytest.raises(ValueError, match="split the batch"):
        given(Case(33)).call(forward)


# ---- Streams and devices


def test_a_call_only_queues_its_work(forward: CudaForward) -> None:
    here = given_long()
    here.call(forward)
    torch.cuda.synchronize(DEVICE)
    before = control.launches()
    pooled, sequence = here.call(forward)
    assert control.launches() == before + 4
    assert untouched(pooled)
    assert untouched(sequence)
    here.assert_right((pooled, sequence))


def test_work_goes_to_torchs_current_stream(forward: CudaForward) -> None:
    here = given(Case(33))
    here.call(forward)
    with torch_cuda.side_stream(DEVICE) as stream:
        result = here.call(forward)
        with torch.cuda.device(DEVICE):
            torch_cuda.Stream(0).synchronize()  # another stream than that of the call
            assert untouched(result[0])
            stream.synchronize()
        assert not untouched(result[0])
        here.assert_right(result)


def test_streams_share_one_kernel(forward: CudaForward) -> None:
    """The first call prepares on its own stream what a call on another stream uses before the first was run."""
    bad, good = given(Case(33, bad_ids=True)), given(Case(33), seed=1)
    with torch_cuda.side_stream(DEVICE):
        first = good.call(forward)
    with torch_cuda.side_stream(DEVICE) as stream, torch.cuda.device(DEVICE):
        bad.call(forward)
        stream.synchronize()
    torch.cuda.synchronize(DEVICE)
    good.assert_right(first)
    with pytest.raises(IndexError):
        forward.check()


def test_every_device_is_served(forward: CudaForward) -> None:
    """Each by its own stream, status and leave to use shared memory."""
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        here = given_long(seed=index, device=device)
        result = here.call(forward)
        assert result[0].device == device
        here.assert_right(result)
        forward.check()
        bad_id(device=device).call(forward)
        with pytest.raises(IndexError, match=BAD_ID):
            forward.check()


def test_check_waits_for_all_streams(forward: CudaForward) -> None:
    bad = bad_id()
    with torch_cuda.side_stream(DEVICE):
        bad.call(forward)
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()


def test_a_thread_without_a_context_may_call(forward: CudaForward) -> None:
    here, done = given(Case(33)), []
    thread = threading.Thread(target=lambda: done.append(here.call(forward)))
    thread.start()
    thread.join()
    here.assert_right(done[0])


def test_the_kernel_for_long_bags_asks_for_its_shared_memory(forward: CudaForward) -> None:
    work = launch_of(shape_of(PLAN), 3, 1300)
    assert [k.opts_in for k in work.kernels] == [False, False, True, False]
    here = given_long()
    here.assert_right(here.call(forward))
    attributes = forward._kernels[DEVICE, work.kernels[2].symbol].attributes
    assert attributes[0].max_dynamic_shared_size_bytes == work.kernels[2].shared


# ---- Bad input


def with_batch(here: Given, **changes: Tensor) -> Given:
    """The same, with some of the batch replaced on the device."""
    device = here.batch.values.device
    batch = here.batch._replace(**{name: tensor.to(device) for name, tensor in changes.items()})
    return replace(here, batch=batch)


def bad_id(value: int = 77, device: torch.device = DEVICE) -> Given:
    """An id that table 'b' does not have, of the second feature."""
    here = given(Case(4, "one"), device=device)
    values = here.drawn.values.clone()
    values[5] = value
    return with_batch(here, values=values)


BAD_ID = r"feature 'mean': id 77 of sample 1, position 0 is not a row of table 'b'; allowed: 0 to 49"


def test_check_raises_what_went_wrong_once(forward: CudaForward) -> None:
    forward.check()
    bad_id().call(forward)
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()
    forward.check()
    good = given(Case(33))
    good.assert_right(good.call(forward))
    forward.check()


def test_the_next_call_raises_once_the_news_have_arrived(forward: CudaForward) -> None:
    good, bad = given(Case(4, "one")), bad_id()
    good.call(forward)
    forward.check()
    metadata_of(bad.device_tables, "error")
    with control.setting(patience=3):
        bad.call(forward)
        for _ in range(3):  # the device is not so far, and nobody waits for it
            assert untouched(good.call(forward)[0])
        before = control.launches()
        with pytest.raises(IndexError, match=BAD_ID):
            good.call(forward)
        assert control.launches() == before
        good.assert_right(good.call(forward))


def test_errors_reach_a_caller_that_is_always_ahead_of_the_device(forward: CudaForward) -> None:
    good = given(Case(4, "one"))
    good.call(forward)
    good.call(forward)
    bad_id().call(forward)
    with pytest.raises(IndexError):
        for _ in range(12):
            good.call(forward)


def test_bad_offsets_come_before_bad_ids(forward: CudaForward) -> None:
    here = bad_id()
    offsets = here.drawn.offsets.clone()
    offsets[1] = 5
    with_batch(here, offsets=offsets).call(forward)
    with pytest.raises(ValueError, match=r"offsets: offsets\[\d+\] is \d .*offsets must start at 0, never fall"):
        forward.check()


def test_in_zero_mode_bad_offsets_are_an_error_still(forward: CudaForward) -> None:
    here = given(Case(4, "one"))
    offsets = here.drawn.offsets.clone()
    offsets[2] = -4
    with_batch(here, offsets=offsets).call(forward, "zero")
    with pytest.raises(ValueError, match="offsets"):
        forward.check()


def test_a_concat_bag_past_its_hotness_is_an_error(forward: CudaForward) -> None:
    here = given(Case(1, "one"))
    values = torch.zeros(8, dtype=torch.int64)
    offsets = torch.tensor([0, 1, 2, 3, 6, 7, 8])
    with_batch(here, values=values, offsets=offsets, weights=torch.ones(8)).call(forward)
    with pytest.raises(ValueError, match=r"feature 'concat': the bag of sample 0 has 3 ids, hotness=2 allows 2"):
        forward.check()


def test_modes_do_not_share_their_status(forward: CudaForward) -> None:
    good = given(Case(4, "one"))
    bad_id().call(forward, "zero")
    good.call(forward, "error")
    forward.check()
    good.call(forward, "error")


# ---- Graphs


def test_a_captured_call_can_be_replayed(forward: CudaForward) -> None:
    here, other = given_long(), given_long(seed=1)
    here.call(forward)
    with torch_cuda.side_stream(DEVICE):
        graph = torch_cuda.Graph(DEVICE)
        with graph.capture():
            result = here.call(forward)
        for _ in range(2):
            graph.replay()
            here.assert_right(result)
        for target, source in zip(here.device_tables, other.device_tables, strict=True):
            target.copy_(source)
        graph.replay()
        replace(here, tables=other.tables).assert_right(result)
        forward.check()


def test_a_captured_call_reports_bad_ids_too(forward: CudaForward) -> None:
    here = bad_id()
    here.call(forward)
    with pytest.raises(IndexError):
        forward.check()
    with torch_cuda.side_stream(DEVICE):
        graph = torch_cuda.Graph(DEVICE)
        with graph.capture():
            here.call(forward)
        graph.replay()
        with pytest.raises(IndexError, match=BAD_ID):
            forward.check()


def test_a_first_call_inside_a_capture_is_refused(forward: CudaForward) -> None:
    short, long = given(Case(4)), given_long()
    with torch_cuda.side_stream(DEVICE):
        with torch_cuda.Graph(DEVICE).capture(), pytest.raises(RuntimeError, match="once before capturing"):
            short.call(forward)
        short.call(forward)
        metadata_of(long.device_tables, "error")
        with torch_cuda.Graph(DEVICE).capture():
            short.call(forward)
            with pytest.raises(RuntimeError, match="once before capturing"):
                long.call(forward)  # needs kernels of its own


# ---- What the driver refuses


def test_a_driver_older_than_the_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with control.setting(version=12090):
        with pytest.raises(ToolchainError, match="update the driver"):
            CudaForward(PLAN, image())
        monkeypatch.setattr(cuda, "installed_nvrtc", lambda: None)
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
    with pytest.raises(LaunchError, match=r"damaged or of another version; make it anew .*INVALID_IMAGE"):
        given(Case(4)).call(CudaForward(PLAN, code))


def test_code_without_the_kernel_is_refused(forward: CudaForward) -> None:
    renamed = image().replace(b"_long\0", b"_gone\0")
    assert renamed != image()
    forward = CudaForward(PLAN, renamed)
    given(Case(4)).call(forward)
    with pytest.raises(LaunchError, match=rf"{PLAN.uri}_long on cuda:0: .*CUDA_ERROR_NOT_FOUND"):
        given_long().call(forward)


def test_no_memory_for_the_code(forward: CudaForward) -> None:
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
    with pytest.raises(LaunchError, match=r"does not take \d+ blocks of \d+ threads with \d+ bytes .*smaller block"):
        here.call(forward)


def test_a_device_without_that_much_shared_memory(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, {"shared": 300_000})
    with pytest.raises(ToolchainError, match=r"device 0 does not give a block of .* its 300000 bytes"):
        given(Case(4)).call(forward)


def forge(monkeypatch: pytest.MonkeyPatch, change: dict[str, int]) -> None:
    """Makes a call launch its first kernel otherwise."""

    def forged(*words: Any) -> Any:
        work = launch_of(*words)
        return replace(work, kernels=(replace(work.kernels[0], **change), *work.kernels[1:]))

    monkeypatch.setattr(forward_call, "launch_of", forged)


def test_a_kernel_that_goes_wrong_spoils_the_device(forward: CudaForward) -> None:
    """As on a GPU: nobody knows before somebody waits, and then everybody."""
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

    def refused(*words: Any) -> None:
        raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    monkeypatch.setattr(forward._core, "launch", refused)
    with pytest.raises(LaunchError, match=r"some kernel on this device went wrong earlier.*CUDA_LAUNCH_BLOCKING=1"):
        good.call(forward, "unchecked")


class CUDAError(Exception):
    """Named as cuda.core's own, which is not public."""


def test_other_errors_are_told_by_their_own_message(forward: CudaForward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward._core, "launch", lambda *words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        given(Case(4)).call(forward)


def test_kernels_are_looked_up_once(forward: CudaForward) -> None:
    class Counting:
        def __init__(self, code: Any) -> None:
            self.code, self.asked = code, []  # type: ignore[var-annotated]

        def get_kernel(self, symbol: str) -> Any:
            self.asked.append(symbol)
            return self.code.get_kernel(symbol)

    code = forward._code = Counting(forward._code)
    for _ in range(3):
        given(Case(4)).call(forward)
    assert code.asked == [PLAN.uri, f"{PLAN.uri}_wide"]
