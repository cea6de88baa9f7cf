"""The CUDA launcher on the emulated driver: what kernels find wrong with a batch reaches the caller, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embforge.launch.cuda.forward import CudaForward
from embforge.launch.metadata import metadata_of
from embforge.verify.cases import Case
from emulated_driver import control
from emulated_driver.cases import BAD_ID, Given, bad_id, given, untouched, with_batch


def test_check_raises_what_went_wrong_once(forward: CudaForward) -> None:
    forward.check()
    bad_id().call(forward)
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()
    forward.check()
    good = given(Case(33))
    good.assert_right(good.call(forward))
    forward.check()


def test_the_next_call_raises_once_the_status_has_arrived(forward: CudaForward) -> None:
    good, bad = given(Case(4, "one")), bad_id()
    good.call(forward)
    forward.check()
    metadata_of(bad.device_tables, "error")
    with control.setting(patience=3):
        bad.call(forward)
        for _ in range(3):  # the device has not come to it, and this call does not wait
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


# ---- Threads


class Lock:
    """A lock that notes when a thread has to wait for it."""

    def __init__(self, waiting: threading.Event) -> None:
        self._lock, self._waiting = threading.Lock(), waiting

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def meanwhile(forward: CudaForward, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> threading.Thread:
    """Runs an action once in another thread, just after a thread has waited for the device.

    The thread that waited continues when the action is done or waits for a lock that is held.
    """
    over = threading.Event()
    for watch in forward._watches.values():
        monkeypatch.setattr(watch, "lock", Lock(over))

    def run() -> None:
        try:
            act()
        finally:
            over.set()

    synchronize, thread = torch.cuda.synchronize, threading.Thread(target=run)

    def waited(*words: Any) -> None:
        synchronize(*words)
        if thread.ident is None:
            thread.start()
            over.wait()

    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    return thread


def wipe_in_a_call(forward: CudaForward, good: Given) -> None:
    with pytest.raises(IndexError, match=BAD_ID):
        for _ in range(12):
            good.call(forward)


def wipe_in_check(forward: CudaForward, good: Given) -> None:
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()


@pytest.mark.parametrize("wipe", [wipe_in_a_call, wipe_in_check])
def test_an_error_is_not_raised_twice_if_another_thread_calls_while_it_is_wiped(
    forward: CudaForward, monkeypatch: pytest.MonkeyPatch, wipe: Callable[[CudaForward, Given], None]
) -> None:
    good = given(Case(4, "one"))
    bad_id().call(forward)
    other = meanwhile(forward, monkeypatch, lambda: good.call(forward))
    wipe(forward, good)
    other.join()
    for _ in range(6):
        good.call(forward)
        control.finish()
    forward.check()


@pytest.mark.parametrize("wipe", [wipe_in_a_call, wipe_in_check])
def test_another_threads_mistake_is_not_wiped_unread(
    forward: CudaForward, monkeypatch: pytest.MonkeyPatch, wipe: Callable[[CudaForward, Given], None]
) -> None:
    bad = bad_id()
    bad.call(forward)
    other = meanwhile(forward, monkeypatch, lambda: bad.call(forward))
    wipe(forward, given(Case(4, "one")))
    other.join()
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()


def test_status_words_may_be_written_outside_of_inference_mode_too(forward: CudaForward) -> None:
    with torch.inference_mode():
        bad_id().call(forward)
    (watch,) = forward._watches.values()
    assert not watch.memory.is_inference()
    with pytest.raises(IndexError, match=BAD_ID):
        forward.check()
