"""Destroys the process groups that modules have made for themselves before the interpreter ends.

A thread of gloo may still hold the tensors of a finished collective, and it needs Python's lock to free them. If the
interpreter has ended by then, the process dies by SIGABRT ("terminate called without an active exception"). Destroying
a group waits for its threads.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist


def end_with(user: object, group: dist.ProcessGroup) -> Callable[[], object]:
    """Destroys a group when the object that uses it is freed, when the returned function is called, or at exit,
    whichever comes first."""
    return weakref.finalize(user, _destroy, group, os.getpid())


def end_at_exit(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Destroys a group when the program ends, and not before. Returns the group.

    Groups of only some ranks must exist that long: torch would give the name of a destroyed group to the next one,
    which would then find the first group's entries in the store.
    """
    atexit.register(_destroy, group, os.getpid())
    return group


def _destroy(group: dist.ProcessGroup, process: int) -> None:
    """Destroys a group that the process with this id made, unless the program has already destroyed it."""
    if os.getpid() != process or not dist.is_initialized():  # a forked child has no threads of the group
        return
    try:
        dist.destroy_process_group(group)
    except ValueError:  # torch no longer knows it, because the program has destroyed it
        return
