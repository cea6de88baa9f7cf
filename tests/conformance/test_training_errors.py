"""Calls that training refuses, what a failed call leaves unchanged, and threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from conformance.backends import device_of
from conformance.training import (
    ONE,
    SPEC,
    WITH_ROWS,
    differing,
    draw,
    nothing_changes,
    snapshot,
    steps,
    trained,
    trained_backend,
)
from torch import Tensor

from embforge import optim
from embforge.collection import EmbeddingCollection
from embforge.launch.reference import backward as reference_backward
from embforge.training import pending

# ---- Errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"optimizer": None, "accumulate": True}, ValueError, "accumulate=True needs a fused optimizer"),
        (
            {"optimizer": torch.optim.SGD},
            TypeError,
            r"allowed: one of embforge.optim, such as ef.optim.Adam\(lr=1e-3\)",
        ),
        ({"optimizer": optim.Adam}, TypeError, "allowed: one of embforge.optim"),
        ({"optimizer": "adam"}, TypeError, "optimizer: got 'adam'"),
    ],
)
def test_wrong_optimizers_are_refused(more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(**more)


def test_calls_that_make_no_sense_are_refused() -> None:
    module = trained()
    with pytest.raises(Exception, match="'nowhere'"), nothing_changes(module):
        module.freeze("a", "nowhere")
    assert module(*draw()).requires_grad and module.named_tables()["a"].trainable
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ needs accumulate=True.*max_row_norm"):
        module.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="use_grad_scaler is for a fused optimizer"):
        trained(optimizer=None).use_grad_scaler(torch.amp.GradScaler("cpu"))
    assert trained(optimizer=None).optimizer is None
    with pytest.raises(RuntimeError, match="clip_grad_norm_ of the module is for a fused optimizer"):
        trained(optimizer=None).clip_grad_norm_(1.0)
    with pytest.raises(TypeError, match=r"use_grad_scaler: got 'x'; allowed: a torch\.amp\.GradScaler"):
        module.use_grad_scaler("x")
    for seed in (-1, 2**63, 1.5, "x"):
        with pytest.raises(ValueError, match=r"seed=.* is not allowed; a whole number, 0 <= seed < 2\^63"):
            module.seed(seed)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"seed\(\) is for a fused optimizer"):
        trained(optimizer=None).seed(1)
    module.seed(2**63 - 1)
    assert int(module.state_dict()["optim.seed"]) == 2**63 - 1


def _last(values: Tensor) -> Tensor:
    """A batch whose last id, in the last feature that a kernel handles, is no row."""
    values = values.clone()
    values[-1] = 60
    return values


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_bad_id_changes_nothing(backend: Any, accumulate: bool) -> None:
    """A GPU, whose calls never wait, raises later."""
    module = trained(backend, accumulate=accumulate)
    values, offsets, weights = draw(backend)
    with nothing_changes(module), pytest.raises(IndexError, match="feature 'z': id 60 of"):
        module(_last(values), offsets, weights)
    for hidden, error, message in (
        (False, RuntimeError, "modified by an inplace operation"),
        (True, IndexError, "feature 'z': id 60 of"),  # what autograd cannot see, the kernel does
    ):
        values = draw(backend)[0]
        loss = module(values, offsets, weights).sum()
        (values.data if hidden else values).copy_(_last(values))
        with nothing_changes(module), pytest.raises(error, match=message):
            loss.backward()
    module.step()
    assert steps(module) == 0
    module(*draw(backend)).sum().backward()
    module.step()
    assert steps(module) == 1


@pytest.mark.parametrize("part", ["apply_rule", "rounded", "canonical_reduce"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_lack_of_memory_changes_nothing(accumulate: bool, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first table has been handled already."""
    module = trained(accumulate=accumulate)
    real, calls = getattr(reference_backward, part), []

    def failing(*given: Any, **more: Any) -> Any:
        calls.append(part)
        if len(calls) == (1 if part == "rounded" else 2):
            raise MemoryError("no more")
        return real(*given, **more)

    monkeypatch.setattr(reference_backward, part, failing)
    with nothing_changes(module), pytest.raises(MemoryError, match="no more"):
        module(*draw()).sum().backward()
        module.step()
    monkeypatch.undo()
    module.drop_gradients()
    module(*draw()).sum().backward()
    module.step()
    assert steps(module) == 1


# ---- Threads ---------------------------------------------------------------------------------------------


def _in_threads(*jobs: Callable[[], None]) -> None:
    threads = [Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@trained_backend
def test_two_modules_train_in_two_threads(backend: Any) -> None:
    modules, twins = [trained(backend) for _ in range(2)], [trained(backend) for _ in range(2)]

    def train(module: EmbeddingCollection, first: int) -> None:
        for seed in range(first, first + 4):
            module(*draw(backend, seed)).sum().backward()

    _in_threads(lambda: train(modules[0], 0), lambda: train(modules[1], 100))
    train(twins[0], 0)
    train(twins[1], 100)
    for module, twin in zip(modules, twins, strict=True):
        assert steps(module) == 4 and differing(snapshot(module), snapshot(twin)) == []


@trained_backend
def test_two_threads_with_one_module_lose_no_update(backend: Any) -> None:
    """Gradients are whole numbers, whose sums are exact in any order."""
    module = trained(backend, spec=SPEC, optimizer=optim.SGD(lr=1.0))
    with torch.no_grad():
        module.weight("a").zero_()
    device = device_of(backend)
    values = torch.arange(60, device=device)
    offsets = torch.tensor([0, 60, 60, 60], device=device)  # all rows of `a` in the one bag of feature `x`
    losses = [[module(values, offsets)[:, :15].sum() for _ in range(15)] for _ in range(2)]

    def train(mine: list[Tensor]) -> None:
        for loss in mine:
            loss.backward()

    _in_threads(*(lambda mine=mine: train(mine) for mine in losses))  # type: ignore[misc]
    assert steps(module) == 30 and module.weight("a").unique().tolist() == [-30.0]


def test_gradients_that_come_during_a_step_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward passes of another thread come during `step()`, and during `clip_grad_norm_`."""
    module = trained(spec=ONE, accumulate=True, optimizer=optim.SGD(lr=1.0))
    with torch.no_grad():
        module.weight("t").zero_()
    values, offsets = torch.tensor([3]), torch.tensor([0, 1])
    real, threads = pending.as_batch, []

    def interrupted(*given: Any) -> Any:
        threads.append(Thread(target=lambda: module(values, offsets).sum().backward()))
        threads[-1].start()
        threads[-1].join(0.1)  # it waits for the step, and so this does not wait for it
        return real(*given)

    module(values, offsets).sum().backward()
    monkeypatch.setattr(pending, "as_batch", interrupted)
    module.clip_grad_norm_(1e6)
    module.step()
    monkeypatch.undo()
    for thread in threads:
        thread.join()
    module.step()
    assert len(threads) == 2 and module.weight("t")[3].tolist() == [-3.0] * 5


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("more", [{}, {"accumulate": True}, {"optimizer": None}])
def test_offsets_that_numpy_has_changed_are_refused(backend: str, more: dict[str, Any]) -> None:
    """numpy changes a tensor but not its version, so the backward compares the offsets with the number of gradients."""
    module = trained(backend, WITH_ROWS, **more)
    values, offsets, weights = torch.arange(8), torch.arange(9), torch.ones(8)
    rows = module.forward_dict(values, offsets, weights)["s"]
    offsets.numpy()[6:8] = 0
    offsets.numpy()[1:6] = 0
    with pytest.raises(ValueError, match=r"grad_sequence: 30 numbers; offsets say 120; was the batch changed"):
        rows.sum().backward()
