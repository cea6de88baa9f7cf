"""torch's fused optimizers and tables whose rows have gaps between them.

On the CPU, `torch.optim.Adam(..., fused=True)` and its like take a parameter's memory for contiguous whatever its
strides (torch 2.13): rows would be updated by the gradients of others, and the last ones not at all, silently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

PADDED = "_embforge_padded"
"""An attribute of parameters that have such gaps."""


def guard_padded(parameter: Tensor) -> None:
    """Makes fused optimizers refuse a parameter with gaps between its rows, before they write to it."""
    if not parameter.is_contiguous():
        setattr(parameter, PADDED, True)
        _watch_steps()


@cache
def _watch_steps() -> None:
    """Once per process: torch has hooks for steps of all optimizers, and none for those of a parameter."""
    register_optimizer_step_pre_hook(_refuse_fused)


def _refuse_fused(optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if hasattr(parameter, PADDED) and parameter.grad is not None:
                shape, stride = tuple(parameter.shape), parameter.stride(0)
                raise RuntimeError(
                    f"{type(optimizer).__name__}(fused=True) cannot train a table of shape {shape} whose rows lie "
                    f"{stride} elements apart: torch's fused kernels take no gaps between rows; "
                    "use foreach=True instead of fused=True, or an optimizer of embforge.optim in the module"
                )
