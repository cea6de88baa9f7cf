"""Makes torch's fused optimizers refuse parameters whose rows have padding between them.

On the CPU, `torch.optim.Adam(..., fused=True)` and other fused optimizers treat a parameter's memory as contiguous
whatever its strides are (torch 2.13). They would silently update rows with the gradients of other rows, and the last
rows not at all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

PADDED = "_embforge_padded"
"""Name of an attribute that marks parameters whose rows have padding between them."""


def guard_padded(parameter: Tensor) -> None:
    """Makes fused optimizers refuse a parameter with padding between its rows, before they write to it."""
    if not parameter.is_contiguous():
        setattr(parameter, PADDED, True)
        _watch_steps()


@cache
def _watch_steps() -> None:
    """Registers the check once per process, because torch has hooks for the steps of all optimizers, but none for the
    steps that update one parameter."""
    register_optimizer_step_pre_hook(_refuse_fused)


def _refuse_fused(optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if hasattr(parameter, PADDED) and parameter.grad is not None:
                shape, stride = tuple(parameter.shape), parameter.stride(0)
                raise RuntimeError(
                    f"{type(optimizer).__name__}(fused=True) cannot train a table of shape {shape} whose rows start "
                    f"{stride} elements apart: torch's fused kernels support no padding between rows; "
                    "use foreach=True instead of fused=True, or an optimizer of embforge.optim in the module"
                )
