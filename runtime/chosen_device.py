"""On which device a module's tables are to lie."""

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
    """The device that was asked for, None being torch's default.

    `ToolchainError` if it is a GPU and there is none, ValueError for devices that embforge has no kernels for.
    """
    try:
        chosen = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is none that torch knows here; {ALLOWED}") from error
    if chosen.type not in TABLE_DEVICES:
        raise ValueError(f"device={str(chosen)!r} is not supported: embforge has no kernels for it; {ALLOWED}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ToolchainError(f"device={str(chosen)!r} {NO_GPU}")
    return chosen


def device_after(move: Callable[[Tensor], Tensor], rows: Tensor) -> torch.device:
    """Where a move of a whole module, as `.to(device)`, would bring rows, asked without moving them.

    Raises as `chosen_device`, for all devices that torch itself cannot reach `ToolchainError`.
    """
    try:
        found = move(rows[:0]).device
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises differs from device to device
        reason = str(error).partition("\n")[0]
        if not torch.cuda.is_available() and ("CUDA" in reason or "NVIDIA" in reason):
            raise ToolchainError(f"moving tables to device 'cuda' {NO_GPU}") from error
        raise ToolchainError(f"tables cannot be moved there, torch says: {reason}; {ALLOWED}") from error
    return chosen_device(found)
