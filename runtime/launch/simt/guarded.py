"""Memory for kernels that the SIMT executor checks: each tensor far from all others, so that no overrun meets one."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 1 << 20
"""Bytes before and behind a tensor that belong to nothing. They are never touched, so they cost addresses only."""
LINE = 64
"""Copies lie to a multiple of this as what they are copies of: aligned as that is."""
GARBAGE = 0xA5
"""What memory holds before it is written: no number that a sum leaves alone, no index that is near."""


def guarded_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`, on the CPU: a tensor of garbage between guards."""
    assert device.type == "cpu"
    bytes_ = math.prod(shape) * dtype.itemsize
    if not bytes_:
        return torch.empty(shape, dtype=dtype, device=device)
    return _guarded(bytes_).fill_(GARBAGE).view(dtype).view(shape)


def guarded_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor between guards: its bytes, the gaps between its rows and the one behind the last included."""
    bytes_ = spanned_bytes(tensor)
    if not bytes_:
        return tensor
    copy = _guarded(bytes_, tensor.data_ptr() % LINE)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), bytes_)
    return copy.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def spanned_bytes(tensor: Tensor) -> int:
    """From the first byte to the last, and the gap behind the last row as far as there is memory for it."""
    if not tensor.numel():
        return 0
    size = tensor.element_size()
    last = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = max(last, tensor.shape[0] * tensor.stride(0))
    behind = tensor.untyped_storage().nbytes() // size - int(tensor.storage_offset())
    return size * min(whole, behind)


def _guarded(bytes_: int, shift: int = 0) -> Tensor:
    """Bytes between guards, in a storage of just those; it keeps the mapping alive."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, GUARD + shift + bytes_ + GUARD, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=GUARD + shift, count=bytes_)
