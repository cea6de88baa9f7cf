"""Finds out whether a GradScaler that a module does not know has scaled the loss of a backward pass.

`scaler.scale(loss).backward()` multiplies all gradients, and a fused optimizer updates rows before `scaler.step` could
divide them. A scaler does not notify modules, and autograd does not say where a backward pass started. So once a
process has made a module with a fused optimizer, `GradScaler.scale` adds a hook to the tensors that it returns. The
hook notes the scale of the backward pass that runs it.
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
"""The last backward passes whose loss a scaler multiplied, each with the tensor of the scaler's scale. A pass is looked
up while it runs, so that few entries are enough. Appending to a deque needs no lock."""


@cache
def watch_scalers() -> None:
    """Makes all scalers mark the losses that they scale. It acts once per process; results of `scale` do not change."""
    plain = GradScaler.scale

    @wraps(plain)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled() and not torch.compiler.is_compiling():
            _mark(scaled, scale_of(self))
        return scaled

    GradScaler.scale = scale  # type: ignore[method-assign]


def refuse_unknown_scaler(known: Tensor | None) -> None:
    """Raises RuntimeError if scalers multiplied the loss of the current backward pass, none of them by the `known`
    scale."""
    if _NOTED:
        running = current_pass()
        scales = [scale for noted, scale in list(_NOTED) if noted == running]
        if scales and all(scale is not known for scale in scales):
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
