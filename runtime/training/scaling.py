"""Whether the loss of a backward pass was scaled by a GradScaler that a module does not know.

`scaler.scale(loss).backward()` multiplies all gradients, and fused rows are updated before `scaler.step` could divide
them. Autograd does not tell a node what the backward pass began with, and a scaler tells nothing, so the module looks
for it, as a debugger would: the tensor on which `backward()` was called is in a frame of the thread that called it.
That takes microseconds; if the tensor is something times a constant, a walk over all objects follows, which may take a
tenth of a second. So it is done in the first, second, fourth, eighth, ... backward pass only.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import _engine_run_backward

UNKNOWN = (
    "the loss of this backward pass was scaled by a GradScaler that the module does not know, so that its rows would "
    "be updated by gradients that are too large by the scale; call module.use_grad_scaler(scaler) before "
    "the first forward"
)

_RUNS = _engine_run_backward.__code__
"""Every backward pass is begun by it, from `backward()` and `torch.autograd.grad` alike."""


class Passes:
    """Backward passes of a module: some of them are looked at."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, known: Tensor | None) -> None:
        """A backward pass is about to update rows. RuntimeError if its loss was scaled by a scaler whose scale is not
        the `known` one."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            refuse_unknown_scaler(known)


def refuse_unknown_scaler(known: Tensor | None) -> None:
    """RuntimeError if the tensor that the running backward pass began with is a loss times the scale of a GradScaler.

    That is so if torch multiplied it by a constant, and the loss before that is still held and times the scale of a
    live scaler gives it; numbers decide, because the graph has forgotten its constants by now.
    """
    for scaled in _beginnings():
        node: Any = scaled.grad_fn
        if node is None or node.name() != "MulBackward0" or scaled.numel() != 1:
            continue
        before = [reached for reached, _ in node.next_functions if reached is not None]
        if len(before) != 1:
            continue
        alive = gc.get_objects()
        scales = _scales_among(alive)
        if any(scale is not known for scale in scales):
            losses = [each for each in alive if type(each) is Tensor and _comes_from(each, before[0])]
            by = [scale for scale in scales if any(_is_product(scaled, loss, scale) for loss in losses)]
            if by and not any(scale is known for scale in by):
                raise RuntimeError(UNKNOWN)


def _scales_among(objects: list[Any]) -> list[Tensor]:
    """Where the scalers among these keep their scales, if they are on and have been used."""
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, GradScaler)}
    scalers: list[Any] = [each for each in objects if type(each) in kinds] if kinds else []
    return [each._scale for each in scalers if each.is_enabled() and each._scale is not None]


def _beginnings() -> tuple[Tensor, ...]:
    """What the running backward pass was called on. Backward passes of GPUs run in threads of torch's own, while the
    one that called waits; where several wait, nobody knows whose pass this is."""
    own = _call_in(sys._getframe(1))
    if own is not None:
        return own
    waiting = [found for frame in sys._current_frames().values() if (found := _call_in(frame)) is not None]
    return waiting[0] if len(waiting) == 1 else ()


def _call_in(frame: FrameType | None) -> tuple[Tensor, ...] | None:
    while frame is not None and frame.f_code is not _RUNS:
        frame = frame.f_back
    return None if frame is None else tuple(each for each in frame.f_locals["t_outputs"] if isinstance(each, Tensor))


def _comes_from(tensor: Tensor, node: Any) -> bool:
    return tensor.requires_grad and tensor.numel() == 1 and tensor.grad_fn is node


@torch.no_grad()
def _is_product(scaled: Tensor, loss: Tensor, scale: Tensor) -> bool:
    """Whether a scaler's `scale(loss)` gives `scaled`."""
    return bool(loss != 0) and bool((loss * scale.to(loss.device)).reshape(()) == scaled.reshape(()))
