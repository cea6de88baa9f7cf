"""What the operating system should know about a big block of host memory."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

MADV_HUGEPAGE = 14
HUGE_PAGE_BYTES = 2 << 20
WORTH_ASKING_BYTES = 2 * HUGE_PAGE_BYTES


def ask_for_huge_pages(block: Tensor) -> None:
    """Asks for pages of 2 MB under a contiguous block of host memory that nobody has written to yet.

    Random rows of a big table miss the TLB at nearly every row, and a big result costs a page fault every
    4 KB; both end with huge pages. It is advice: a system that does not know it changes nothing.
    """
    size = block.numel() * block.element_size()
    if sys.platform != "linux" or size < WORTH_ASKING_BYTES:
        return
    begin = -(-block.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (block.data_ptr() + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    _madvise()(begin, end - begin, MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
