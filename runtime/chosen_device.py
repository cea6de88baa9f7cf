"""The device of a module's tables: which devices are allowed, and which one the user has chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError

TABLE_DEVICES = ("cpu", "cuda", "meta")
NO_GPU = (
    "needs a CUDA GPU and a torch built for it; none is here; use device='cpu', or backend='simt' on device='cpu' to "
    "execute the CUDA kernels slowly without a GPU"
)
ALLOWED = "allowed: 'cpu', 'cuda' with the number of a GPU or without, as 'cuda:1', and 'meta'"


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device that a `device` argument means; None means torch's default device.

    `ToolchainError` if it is a GPU and there is none, ValueError for devices for which embforge has no kernels.
    """
    try:
        chosen = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device that torch knows here; {ALLOWED}") from error
    if chosen.type not in TABLE_DEVICES:
        raise ValueError(f"device={str(chosen)!r} is not supported: embforge has no kernels for it; {ALLOWED}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ToolchainError(f"device={str(chosen)!r} {NO_GPU}")
    return chosen


def device_after(move: Callable[[Tensor], Tensor], rows: Tensor) -> torch.device:
    """The device to which `move`, a function such as `.to(device)` passes to `_apply`, would move rows. It moves
    nothing.

    Raises the errors of `chosen_device`, and `ToolchainError` for all devices that torch itself cannot use.
    """
    try:
        device = move(rows[:0]).device
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises differs from device to device
        reason = str(error).partition("\n")[0]
        if not torch.cuda.is_available() and ("CUDA" in reason or "NVIDIA" in reason):
            raise ToolchainError(f"moving tables to device 'cuda' {NO_GPU}") from error
        raise ToolchainError(f"tables cannot be moved there; torch's error: {reason}; {ALLOWED}") from error
    return chosen_device(device)
