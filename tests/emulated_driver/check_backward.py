"""The CUDA launcher's backward, through the real cuda.core, on the emulated driver: results, streams, graphs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support import training

from embforge.launch.kernels import Program, kernel_of
from embforge.verify.cases import Case
from emulated_driver import control, torch_cuda
from emulated_driver.cases import DEVICE, assert_same_bits, untouched
from emulated_driver.trained import FEW, MANY, REDUCE, USUAL, WEIGHTS, Training, batch_of, hot_batch, on_device


def launches_of(kernel: Any, here: Training, case: Case = USUAL) -> int:
    """The number of launches of one update."""
    before = control.launches()
    here.both(kernel, batch_of(case))
    return control.launches() - before


# ---- Results


def test_updates_have_the_references_bits(backward: Any) -> None:
    here = Training()
    for number, case in enumerate((USUAL, MANY, Case(0), Case(17, weights="absent"), Case(4, "none"))):
        here.both(backward, batch_of(case, number))
    here.both(
        backward, training.batch_of([[[0], [1]], [[0], [1]], [[2], [3]], [[4], [5]]], torch.int64)
    )  # no row twice
    here.assert_right()
    backward.check()


def test_a_hot_row_has_the_references_bits(backward: Any) -> None:
    here = Training()
    here.both(backward, hot_batch())
    here.assert_right()


def test_gradients_that_are_not_finite_change_nothing(backward: Any) -> None:
    here, batch = Training(grad_scale=4.0), batch_of(USUAL)
    assert here.update(backward, batch).tolist() == [0.0]
    here.follow(batch)
    here.assert_right()
    gradients = here.gradients(batch)
    gradients.pooled[1, 2] = torch.inf
    with here.unchanged():
        assert here.update(backward, batch, gradients=gradients).tolist() == [torch.inf]


def test_bad_ids_of_an_update_are_absent_in_zero_mode(backward: Any) -> None:
    here = Training()
    for seed in range(2):
        here.both(backward, batch_of(Case(9, bad_ids=True), seed), "zero")
    here.assert_right()
    backward.check()


def test_reduced_gradients_have_the_references_bits(reduce: Any) -> None:
    here = Training()
    for case in (MANY, Case(4, "none"), Case(0)):
        batch = batch_of(case)
        gradients = here.gradients(batch)
        truth = kernel_of(Program(training.reference_of(REDUCE)).text)
        words = training.metadata_of(here.truth, "error")
        wanted = truth(words, here.truth.tables, batch, gradients, "error")
        found = reduce(here.metadata(), here.tables, *on_device(batch, gradients, DEVICE), "error")
        for (rows, sums), (true_rows, true_sums) in zip(found, wanted, strict=True):
            assert torch.equal(rows.cpu(), true_rows)
            assert_same_bits(sums.cpu(), true_sums)
    reduce.check()


def test_gradients_of_weights_have_the_references_bits(weight_gradient: Any) -> None:
    here = Training()
    truth = kernel_of(Program(training.reference_of(WEIGHTS)).text)
    for case in (MANY, USUAL, Case(0)):
        batch = batch_of(case)
        gradients = here.gradients(batch)
        words = training.metadata_of(here.truth, "error")
        wanted = truth(words, here.truth.tables, batch, gradients, "error")
        found = weight_gradient(here.metadata(), here.tables, *on_device(batch, gradients, DEVICE), "error")
        assert_same_bits(found.cpu(), wanted)
    weight_gradient.check()


# ---- Streams and devices


def test_an_update_only_queues_its_work(backward: Any) -> None:
    here, batch = Training(), batch_of(MANY)
    count = launches_of(backward, here, MANY)
    given = on_device(batch, here.gradients(batch), DEVICE)
    torch.cuda.synchronize(DEVICE)
    before, step = control.launches(), here.counters.inner.clone()
    here.updates(backward, *given)
    assert control.launches() == before + count
    assert torch.equal(here.counters.inner, step)
    here.follow(batch)
    here.assert_right()


def test_updates_go_to_torchs_current_stream(backward: Any) -> None:
    here, batch = Training(), batch_of(USUAL)
    here.both(backward, batch)
    given = on_device(batch, here.gradients(batch), DEVICE)
    torch.cuda.synchronize(DEVICE)
    step = here.counters.inner.clone()
    with torch_cuda.side_stream(DEVICE) as stream:
        here.updates(backward, *given)
        with torch.cuda.device(DEVICE):
            torch_cuda.Stream(0).synchronize()  # another stream than that of the call
            assert torch.equal(here.counters.inner, step)
            stream.synchronize()
        here.follow(batch)
        here.assert_right()


def test_gradients_of_weights_are_only_queued(weight_gradient: Any) -> None:
    here, batch = Training(), batch_of(USUAL)
    given = on_device(batch, here.gradients(batch), DEVICE)
    weight_gradient(here.metadata(), here.tables, *given, "error")
    torch.cuda.synchronize(DEVICE)
    assert untouched(weight_gradient(here.metadata(), here.tables, *given, "error"))


def test_every_device_is_trained(backward: Any, reduce: Any) -> None:
    for index in (1, 0, 1):
        here = Training(seed=index, device=torch.device("cuda", index))
        here.both(backward, batch_of(USUAL, index))
        here.assert_right()
        given = on_device(batch_of(USUAL), here.gradients(batch_of(USUAL)), here.device)
        for rows, _ in reduce(here.metadata(), here.tables, *given, "error"):
            assert rows.device == here.device
    backward.check()


def test_threads_may_train_tables_of_their_own(backward: Any) -> None:
    several = [Training(seed) for seed in range(3)]

    def train(here: Training) -> None:
        for number in range(3):
            here.both(backward, batch_of(USUAL, number))

    threads = [threading.Thread(target=train, args=(here,)) for here in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for here in several:
        here.assert_right()


# ---- Graphs


def test_a_captured_update_can_be_replayed(backward: Any) -> None:
    """Every replay is a step of its own, with what the tensors hold by then."""
    here, batch, other = Training(), batch_of(FEW), batch_of(FEW, seed=1)
    here.both(backward, batch)
    torch.cuda.synchronize(DEVICE)
    with torch_cuda.side_stream(DEVICE):
        given, gradients = on_device(batch, here.gradients(batch), DEVICE)
        here.metadata()
        graph = torch_cuda.Graph(DEVICE)
        with here.unchanged(), graph.capture():
            verdict = here.updates(backward, given, gradients)
        for now in (batch, other, batch):
            for target, source in zip((given, gradients), on_device(now, here.gradients(now), DEVICE), strict=True):
                for inner, new in zip(target, source, strict=True):
                    if isinstance(inner, torch.Tensor):
                        inner.copy_(new)
            graph.replay()
            here.follow(now)
            here.assert_right()
        assert verdict.tolist() == [0.0]
        backward.check()


def test_a_first_update_inside_a_capture_is_refused(backward: Any) -> None:
    here, few, many = Training(), batch_of(FEW), batch_of(MANY)
    with torch_cuda.side_stream(DEVICE):
        of_few, of_many = (on_device(batch, here.gradients(batch), DEVICE) for batch in (few, many))
        here.metadata()
        with (
            here.unchanged(),
            torch_cuda.Graph(DEVICE).capture(),
            pytest.raises(RuntimeError, match="once before capturing"),
        ):
            here.updates(backward, *of_few)
        here.both(backward, few)
        with here.unchanged(), torch_cuda.Graph(DEVICE).capture():
            here.updates(backward, *of_few)
            with pytest.raises(RuntimeError, match="once before capturing"):
                here.updates(backward, *of_many)  # needs kernels of its own
    here.assert_right()


def test_a_reduction_inside_a_capture_is_refused(reduce: Any) -> None:
    device = torch.device("cuda", 1)
    here, batch = Training(device=device), batch_of(USUAL)
    with torch_cuda.side_stream(device):
        given = on_device(batch, here.gradients(batch), device)
        words = here.metadata()
        reduce(words, here.tables, *given, "error")
        with (
            torch_cuda.Graph(device).capture(),
            pytest.raises(RuntimeError, match="the number of rows that have a gradient"),
        ):
            reduce(words, here.tables, *given, "error")
