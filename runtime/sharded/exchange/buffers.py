"""Memory of big exchanges, used again from call to call: fresh pages cost the host as much as the bytes that fill
them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embforge.memory import Results


class Buffers:
    """Uninitialised tensors by what they are for. One that somebody still holds is never given out again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Results] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":  # torch's own allocator keeps what is freed
            return torch.empty(shape, dtype=dtype, device=device)
        found = self._kept.get((name, dtype))
        if found is None:
            found = self._kept.setdefault((name, dtype), Results(dtype))
        elements = prod(shape)
        return found.empty(_rounded(elements))[:elements].view(shape)


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what the device does."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _rounded(elements: int) -> int:
    """Up to the next eighth of a power of two: what travels differs a little from batch to batch, and a block is used
    again if the next one is as large."""
    step = 1 << max(0, elements.bit_length() - 4)
    return -(-elements // step) * step
