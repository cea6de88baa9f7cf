"""The end of process groups that modules make for themselves.

A thread of gloo may still hold the tensors of a collective that is done, and it needs Python's lock to drop them. If
the interpreter is gone by then, the process dies by SIGABRT ("terminate called without an active exception"). Giving a
group back waits for its threads, so each group is given back before the interpreter goes.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist


def end_with(owner: object, group: dist.ProcessGroup) -> Callable[[], object]:
    """Gives a group back when its owner is freed, when the result is called, or at exit, whichever comes first."""
    return weakref.finalize(owner, _give_back, group, os.getpid())


def end_at_exit(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Gives a group back when the program ends, and not before; returns the group.

    For groups of a part of the ranks: torch would give the name of one that is gone, and with it what it left in the
    store, to the next.
    """
    atexit.register(_give_back, group, os.getpid())
    return group


def _give_back(group: dist.ProcessGroup, process: int) -> None:
    """Ends a group that this process made, unless the program has ended it already."""
    if os.getpid() != process or not dist.is_initialized():  # a forked child has no threads of the group
        return
    try:
        dist.destroy_process_group(group)
    except ValueError:  # torch no longer knows it, because the program has destroyed it
        return
