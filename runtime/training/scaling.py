"""Whether the loss of a backward pass was scaled by a GradScaler that a module does not know.

`scaler.scale(loss).backward()` multiplies all gradients, and fused rows are updated before `scaler.step` could divide
them. A scaler does not tell the model's parts, and autograd does not say what a pass began with. So from the first
fused module on, `GradScaler.scale` leaves a hook on the tensors that it returns; a backward pass that comes through it
notes by which scale it is multiplied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from embforge.torch_internals import current_pass, scale_of

UNKNOWN = (
    "the loss of this backward pass was scaled by a GradScaler that the module does not know, so that its rows would "
    "be updated by gradients that are too large by the scale; call module.use_grad_scaler(scaler) before "
    "the first forward"
)

_NOTED: deque[tuple[int, Tensor]] = deque(maxlen=16)
"""The last backward passes that a scaler multiplied, and where it keeps its scale. A pass is looked up while it runs,
so few entries are enough; appending to a deque needs no lock."""


@cache
def watch_scalers() -> None:
    """Makes all scalers leave their mark, once per process. What they return is as it was."""
    plain = GradScaler.scale

    @wraps(plain)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled() and not torch.compiler.is_compiling():
            _mark(scaled, scale_of(self))
        return scaled

    GradScaler.scale = scale  # type: ignore[method-assign]


def refuse_unknown_scaler(known: Tensor | None) -> None:
    """RuntimeError if scalers multiplied the backward pass that runs now, and none of them by the `known` scale."""
    if _NOTED:
        running = current_pass()
        by = [scale for noted, scale in list(_NOTED) if noted == running]
        if by and all(scale is not known for scale in by):
            raise RuntimeError(UNKNOWN)


def _mark(scaled: Any, scale: Tensor | None) -> None:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad and scale is not None:
            scaled.register_hook(partial(_note, scale))
    elif isinstance(scaled, Iterable):
        for each in scaled:
            _mark(each, scale)


def _note(scale: Tensor, gradient: Tensor) -> None:
    _NOTED.append((current_pass(), scale))
