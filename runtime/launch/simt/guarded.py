"""Guarded memory for kernels that the SIMT executor checks: each tensor is far from all others, so that an overrun does
not reach another tensor."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 1 << 20
"""The unused bytes before and after each tensor. They are never accessed, so they need addresses but no memory."""
LINE = 64
"""Copies have the same address modulo this number as their originals, and so the same alignment."""
GARBAGE = 0xA5
"""The value of each byte before it is written. Numbers of such bytes change every sum that they are added to, and are
not valid indices."""


def guarded_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Does what `torch.empty` does on the CPU: makes a tensor of garbage between guards."""
    assert device.type == "cpu"
    bytes_ = math.prod(shape) * dtype.itemsize
    if not bytes_:
        return torch.empty(shape, dtype=dtype, device=device)
    return _guarded(bytes_).fill_(GARBAGE).view(dtype).view(shape)


def guarded_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor between guards. The gaps after its rows are copied too."""
    bytes_ = spanned_bytes(tensor)
    if not bytes_:
        return tensor
    copy = _guarded(bytes_, tensor.data_ptr() % LINE)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), bytes_)
    return copy.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def spanned_bytes(tensor: Tensor) -> int:
    """The number of bytes from the first to the last of a tensor, with the gap after the last row as far as the storage
    has memory for it."""
    if not tensor.numel():
        return 0
    size = tensor.element_size()
    last = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = max(last, tensor.shape[0] * tensor.stride(0))
    available = tensor.untyped_storage().nbytes() // size - int(tensor.storage_offset())
    return size * min(whole, available)


def _guarded(bytes_: int, shift: int = 0) -> Tensor:
    """Bytes between guards. The tensor's storage has only these bytes, and keeps the mapping alive."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, GUARD + shift + bytes_ + GUARD, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=GUARD + shift, count=bytes_)
