"""Memory of large exchanges, which is reused from call to call: for the host, new pages cost as much time as the bytes
that fill them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embforge.memory import Results


class Buffers:
    """Uninitialised tensors, by a name for their use. Memory is reused only when no tensor uses it any more."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, torch.dtype], Results] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor for a use."""
        if device.type != "cpu":  # torch's allocator for GPUs keeps freed memory anyway
            return torch.empty(shape, dtype=dtype, device=device)
        results = self._results.get((name, dtype))
        if results is None:
            results = self._results.setdefault((name, dtype), Results(dtype))
        elements = prod(shape)
        return results.empty(_rounded(elements))[:elements].view(shape)


def on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Copies numbers to a device, without waiting for its work."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _rounded(elements: int) -> int:
    """A number of elements, rounded up to the next eighth of a power of two. The size of an exchange differs a little
    from batch to batch, and memory is reused only if the next exchange needs the same size."""
    step = 1 << max(0, elements.bit_length() - 4)
    return -(-elements // step) * step
