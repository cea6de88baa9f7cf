"""The CUDA launcher's backward on the emulated driver: every error reaches the caller, and no row changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from embforge.codegen.errors import LaunchError
from embforge.codegen.targets.cuda.backward_launch import backward_launch
from embforge.launch.cuda import watch as cuda_watch
from embforge.launch.gpu import backward_call
from embforge.verify.cases import Case
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE
from emulated_driver.trained import BAD_ID, FEW, MANY, Training, bad_batch, batch_of, on_device

# ---- What kernels find wrong with a batch


def test_a_bad_batch_changes_nothing_and_check_raises_once(backward: Any) -> None:
    here = Training()
    here.both(backward, batch_of(FEW))
    with here.unchanged():
        here.update(backward, bad_batch())
    with pytest.raises(IndexError, match=BAD_ID):
        backward.check()
    backward.check()
    here.both(backward, batch_of(FEW))
    here.assert_right()
    backward.check()


def test_only_the_bad_batch_is_skipped(backward: Any) -> None:
    """Also if the host is ahead of the device and so does not know yet that the batch is bad."""
    here, other, good, bad = Training(), Training(seed=1), batch_of(FEW), bad_batch()
    here.both(backward, good)
    queue = [
        (each, batch, each.gradients(batch)) for each, batch in ((here, good), (here, bad), (here, good), (other, good))
    ]
    given = [(each, *on_device(batch, gradients, DEVICE)) for each, batch, gradients in queue]
    with control.setting(patience=1000):
        for each, *of_device in given:
            each.updates(backward, *of_device)
    for each, batch, gradients in queue:
        if batch is good:
            each.follow(batch, gradients=gradients)
    here.assert_right()
    other.assert_right()
    with pytest.raises(IndexError, match=BAD_ID):
        backward.check()
    backward.check()


def test_the_next_update_raises_and_can_be_repeated(backward: Any) -> None:
    here = Training()
    here.update(backward, bad_batch())
    control.finish()
    before = control.launches()
    with here.unchanged(), pytest.raises(IndexError, match=BAD_ID) as caught:
        here.update(backward, batch_of(FEW))
    assert "done nothing yet and can be repeated" in caught.value.__notes__[0]
    assert control.launches() == before
    here.both(backward, batch_of(FEW))
    here.assert_right()
    backward.check()


def test_bad_offsets_change_nothing(backward: Any) -> None:
    for place, border in ((2, -3), (6, 500), (0, 1)):
        here, batch = Training(), batch_of(FEW)
        gradients, offsets = here.gradients(batch), batch.offsets.clone()
        offsets[place] = border
        with here.unchanged():
            here.update(backward, batch._replace(offsets=offsets), "zero", gradients)
        with pytest.raises(ValueError, match="offsets"):
            backward.check()


def test_a_reduction_raises_its_own_mistake(reduce: Any) -> None:
    here = Training()
    for _ in range(2):
        for batch, bad in ((bad_batch(), True), (batch_of(FEW), False)):
            given = on_device(batch, here.gradients(batch), DEVICE)
            if bad:
                with pytest.raises(IndexError, match=BAD_ID):
                    reduce(here.metadata(), here.tables, *given, "error")
            else:
                reduce(here.metadata(), here.tables, *given, "error")
    reduce.check()


def test_gradients_of_weights_report_bad_ids(weight_gradient: Any) -> None:
    here = Training()
    given = [on_device(batch, here.gradients(batch), DEVICE) for batch in (bad_batch(), batch_of(FEW))]
    for of_device in given:
        weight_gradient(here.metadata(), here.tables, *of_device, "error")
    with pytest.raises(IndexError, match=BAD_ID):
        weight_gradient.check()


def test_a_bad_replay_is_skipped_and_reported(backward: Any) -> None:
    here, good, bad = Training(), batch_of(FEW), bad_batch()
    here.both(backward, good)
    torch.cuda.synchronize(DEVICE)
    with torch_cuda.side_stream(DEVICE):
        given, gradients = on_device(good, here.gradients(good), DEVICE)
        graph = torch_cuda.Graph(DEVICE)
        with graph.capture():
            here.updates(backward, given, gradients)
        for batch in (bad, good):
            given.values.copy_(batch.values.to(DEVICE))
            graph.replay()
        here.follow(good, gradients=type(gradients)(*(x if x is None else x.cpu() for x in gradients)))
        here.assert_right()
        with pytest.raises(IndexError, match=BAD_ID):
            backward.check()
        backward.check()


def test_a_batch_past_what_kernels_count_is_refused(backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_call, "MOST_BAGS", 20)
    here = Training()
    with here.unchanged(), pytest.raises(ValueError, match="split the batch"):
        here.update(backward, batch_of(FEW))


# ---- What the driver refuses


def test_without_memory_nothing_changes(backward: Any) -> None:
    """Whichever of its tensors is the one that does not fit into memory."""
    here, batch = Training(), batch_of(MANY)
    here.both(backward, batch)
    given = on_device(batch, here.gradients(batch), DEVICE)
    torch.cuda.synchronize(DEVICE)
    room, step, failures = 0, 256, 0
    while True:
        torch_cuda.empty_cache()
        before = here.bits()
        with control.setting(memory=control.memory_used() + room):
            try:
                here.updates(backward, *given)
                break
            except torch.OutOfMemoryError:
                failures, room, step = failures + 1, room + step, step * 5 // 4
        assert all(map(torch.equal, here.bits(), before))
    assert failures > 10
    here.follow(batch)
    here.assert_right()


def test_without_memory_for_the_code_nothing_changes(backward: Any) -> None:
    here, batch = Training(), batch_of(FEW)
    given = on_device(batch, here.gradients(batch), DEVICE)
    here.metadata()
    room = control.memory_used() + 65536
    with here.unchanged(), control.setting(memory=room), pytest.raises(LaunchError, match="no memory left"):
        here.updates(backward, *given)
    here.both(backward, batch)
    here.assert_right()


def test_without_memory_for_the_status_words_nothing_changes(backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(words: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no pinned memory")

    here = Training()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_watch, "_Message", full)
        with here.unchanged(), pytest.raises(torch.OutOfMemoryError):
            here.update(backward, batch_of(FEW))
    here.both(backward, batch_of(FEW))
    here.assert_right()


@pytest.mark.parametrize("name", ["prepare", "gradients", "sources", "runs", "chunks", "rows"])
def test_a_kernel_that_is_refused_changes_nothing(backward: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forged(*words: Any) -> Any:
        work = backward_launch(*words)

        def refused(kernel: Any) -> Any:
            return replace(kernel, block=2048) if kernel.symbol.endswith(f"_{name}") else kernel

        return replace(
            work,
            **{part: tuple(map(refused, getattr(work, part))) for part in PARTS},
            rows=refused(work.rows),
        )

    here = Training()
    with monkeypatch.context() as patch:
        patch.setattr(backward_call, "backward_launch", forged)
        with here.unchanged(), pytest.raises(LaunchError, match=rf"_{name} on cuda:0: .*does not accept"):
            here.update(backward, batch_of(Case(17)))
    here.both(backward, batch_of(FEW))
    here.assert_right()


PARTS = ("before_sort", "before_sum", "before_rows", "levels")
"""The launches of a call."""
