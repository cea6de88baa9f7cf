"""The CUDA launcher as it is, through the real cuda.core, on the emulated driver: results, streams, devices, graphs."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from embforge.codegen.targets.cuda.launch import launch_of, shape_of
from embforge.launch.cuda.forward import CudaForward
from embforge.launch.gpu import forward_call
from embforge.launch.metadata import metadata_of
from embforge.launch.reference.forward_train import lookup_train
from embforge.verify.cases import Case
from emulated_driver import control, torch_cuda
from emulated_driver.cases import (
    BAD_ID,
    DEVICE,
    PLAN,
    SPEC,
    assert_same_bits,
    bad_id,
    given,
    given_long,
    image,
    untouched,
    with_batch,
)

CASES = {
    "usual": Case(33),
    "around the chunk": Case(9, "edges"),
    "one-hot": Case(300, "one"),
    "no ids": Case(5, "none"),
    "no weights": Case(17, weights="absent"),
    "long bags": Case(3, "deep"),
}


# ---- Results


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_references_bits(forward: CudaForward, name: str) -> None:
    here = given(CASES[name], special=True)
    here.assert_right(here.call(forward))
    forward.check()


def test_a_forward_keeps_what_its_backward_needs() -> None:
    from embforge.launch.cuda.forward import CudaForwardTrain  # now: mutants.py may have put another one there

    plan = replace(PLAN, op="forward_train")
    kernel = CudaForwardTrain(plan, image(plan))
    for here in (given(Case(9, "edges"), special=True), given_long()):
        *results, winners = lookup_train(SPEC, *here.drawn, here.tables, bounds_check="error")
        *got, positions = here.call(kernel)
        for have, want in zip(got, results, strict=True):
            assert have is not None and want is not None
            assert_same_bits(have.cpu(), want)
        assert positions is not None and winners is not None
        assert torch.equal(positions.cpu(), winners)


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
