"""Big blocks of host memory: what the system should know of them, and results that every call makes anew."""

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
"""Elements of a result that is surely too small to think about."""
KEPT_BYTES = 4 << 20
"""From here on blocks are kept: the C library gives freed ones back to the system (always from 32 MiB on, below that
whenever its heap ends with them), and fresh pages cost as much as the bytes that fill them."""
MOST_KEPT_BYTES = 256 << 20
"""A block past this is not worth holding on to."""


def ask_for_huge_pages(block: Tensor) -> None:
    """Asks for pages of 2 MiB under a contiguous block of host memory that nobody has written to yet.

    Random rows of a big table miss the TLB at nearly every row, and a big result costs a page fault every
    4 KiB; both end with huge pages. It is advice: a system that does not know it changes nothing.
    """
    size = block.numel() * block.element_size()
    if sys.platform != "linux" or size < WORTH_ASKING_BYTES:
        return
    begin = -(-block.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (block.data_ptr() + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    _madvise()(begin, end - begin, MADV_HUGEPAGE)


class Results:
    """Makes the result tensors of one kernel.

    The C library gives big blocks back to the system when they are freed, and the next one is zeroed
    page by page again, which takes longer than many lookups. So two such blocks are kept (a loop holds its last
    result while it makes the next) and used again once nobody holds what was in them: no tensor, view, array,
    storage or other process.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        # Results are made like this one: quicker than naming dtype and device in every call.
        self.like = torch.empty(0, dtype=dtype, device="cpu")
        self._lock = threading.Lock()
        self._kept: deque[_Block] = deque(maxlen=2)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised contiguous tensor that nobody else holds."""
        elements = math.prod(shape)
        size = elements * self.like.itemsize
        if size < WORTH_ASKING_BYTES:
            return self.like.new_empty(*shape)
        if not KEPT_BYTES <= size <= MOST_KEPT_BYTES:
            fresh = self.like.new_empty(*shape)
            ask_for_huge_pages(fresh)
            return fresh
        with self._lock:  # or two threads could find the same block unheld
            unheld = self._unheld(size)
            block = self._new(elements) if unheld is None else unheld
            result: Tensor = self.like.new_empty(0).set_(block.untyped_storage(), 0, shape)  # type: ignore[call-overload]
            return result

    def _unheld(self, size: int) -> Tensor | None:
        for block, alone in self._kept:
            if block.nbytes == size and _holders(block) == alone and not block.untyped_storage().is_shared():
                return block
        return None

    def _new(self, elements: int) -> Tensor:
        block = self.like.new_empty(elements)
        ask_for_huge_pages(block)
        self._kept.append(_Block(block, _holders(block)))
        return block


class _Block(NamedTuple):
    """Memory that is kept, and its holders when nobody but we held it."""

    tensor: Tensor
    alone: tuple[int, int]


def _holders(block: Tensor) -> tuple[int, int]:
    """How many hold the block's memory, in C++ and in Python."""
    storage = block.untyped_storage()
    return storage_holders(storage), sys.getrefcount(storage)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
