"""Large blocks of host memory: huge pages for them, and reuse of the memory of results."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections import deque
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.torch_internals import storage_holders

MADV_HUGEPAGE = 14
HUGE_PAGE_BYTES = 2 << 20
WORTH_ASKING_BYTES = 2 * HUGE_PAGE_BYTES
SMALL = WORTH_ASKING_BYTES // 4
"""The number of elements up to which a result is certainly too small for huge pages and reuse."""
KEPT_BYTES = 4 << 20
"""The size from which blocks are kept for reuse. The C library returns freed blocks to the system (always from 32 MiB
on, and smaller ones if they are at the end of its heap), and new pages cost as much time as writing the results to
them."""
MOST_KEPT_BYTES = 256 << 20
"""The size up to which blocks are kept for reuse."""


def ask_for_huge_pages(block: Tensor) -> None:
    """Asks the system for pages of 2 MiB for a contiguous block of host memory that has not been written yet.

    With small pages, nearly every random row of a large table misses the TLB, and a large result costs a page fault
    every 4 KiB. The request is only advice: a system that does not support it ignores it.
    """
    size = block.numel() * block.element_size()
    if sys.platform != "linux" or size < WORTH_ASKING_BYTES:
        return
    begin = -(-block.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (block.data_ptr() + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    _madvise()(begin, end - begin, MADV_HUGEPAGE)


class Results:
    """Makes the result tensors of one kernel.

    The C library returns large blocks to the system when they are freed, and the system zeroes the pages of the next
    block, which takes longer than many lookups. So two such blocks are kept, because a loop still holds its last result
    while it computes the next one. A block is used again when nothing refers to its memory any more: no tensor, view,
    array, storage or other process.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        # `like.new_empty` is faster than `torch.empty` with dtype and device.
        self.like = torch.empty(0, dtype=dtype, device="cpu")
        self._lock = threading.Lock()
        self._kept: deque[_Block] = deque(maxlen=2)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor of this shape, whose memory no other tensor uses."""
        elements = math.prod(shape)
        size = elements * self.like.itemsize
        if size < WORTH_ASKING_BYTES:
            return self.like.new_empty(*shape)
        if not KEPT_BYTES <= size <= MOST_KEPT_BYTES:
            fresh = self.like.new_empty(*shape)
            ask_for_huge_pages(fresh)
            return fresh
        with self._lock:  # otherwise two threads could find the same unused block
            unused = self._unused(size)
            block = self._new(elements) if unused is None else unused
            result: Tensor = self.like.new_empty(0).set_(block.untyped_storage(), 0, shape)  # type: ignore[call-overload]
            return result

    def _unused(self, size: int) -> Tensor | None:
        for block, unused in self._kept:
            if block.nbytes == size and _references(block) == unused and not block.untyped_storage().is_shared():
                return block
        return None

    def _new(self, elements: int) -> Tensor:
        block = self.like.new_empty(elements)
        ask_for_huge_pages(block)
        self._kept.append(_Block(block, _references(block)))
        return block


class _Block(NamedTuple):
    """A block of memory that is kept for reuse."""

    tensor: Tensor
    unused: tuple[int, int]
    """The numbers of references to its memory while no result uses it, see `_references`."""


def _references(block: Tensor) -> tuple[int, int]:
    """The numbers of references to the memory of a block, in C++ and in Python."""
    storage = block.untyped_storage()
    return storage_holders(storage), sys.getrefcount(storage)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
