"""Checks that a forward which a backward pass repeats (torch.utils.checkpoint) reads the same rows as the first
time."""

from __future__ import annotations

from threading import get_ident

import torch

from embforge.torch_internals import current_node, current_pass, node_clock, saved_tensors_hooks

RECOMPUTED = (
    "a recomputed forward (torch.utils.checkpoint) would read rows that were updated since the first forward, and so "
    "compute different results; use accumulate=True, which updates in step(), or call the module outside of the "
    "checkpointed function. (If several threads call the module, this is refused after the first update.)"
)

_gradients_on = torch.is_grad_enabled  # named once for speed: every eager call runs note()

NEVER = 2**64
"""A number greater than that of any node: autograd gives 2^64 - 1 to nodes that it runs first."""


class Forwards:
    """Remembers when a module's forwards ran, and on which version of its rows.

    Time is counted by autograd, which numbers the nodes of each thread as it makes them. When a backward pass repeats a
    forward, the number of the node whose backward runs says when the first forward ran:

    - With `use_reentrant=True`, and in similar functions, that node was made just before the first forward. So every
      forward since then must have read the present version of the rows.
    - Otherwise the node was made after the first forward, and its backward unpacks saved tensors through hooks, by
    which
      the two cases are distinguished. So the rows must have had their present version since before the node was made.

    A forward without gradients inside a backward pass may come from code that only reads results, such as a hook, and
    is never refused. It may also be the first forward of a checkpoint within a checkpoint: if rows have changed, that
    checkpoint may not be repeated.
    """

    def __init__(self) -> None:
        self._version = -1
        self._old = -1  # when a forward last read an earlier version
        self._new = -1  # when a forward first read this version
        self._last = -1  # when the last forward ran
        self._thread: int | None = None
        self._mixed = False  # whether several threads have run forwards
        self._stale: set[int] = set()  # nodes made in a backward pass after rows had changed

    def note(self, version: int, *, in_node: bool = False) -> None:
        """Called when a forward is about to run. RuntimeError if a backward pass repeats it and rows have changed.

        `in_node`: it runs within the forward of an autograd node, such as that of a compiled graph. Gradients are
        disabled there although they are wanted, and the node, whose saved tensors may be unpacked later, already has
        its number.
        """
        if current_pass() != -1:
            self._check(version, wanted=in_node or _gradients_on())
            return
        now, thread = node_clock() - in_node, get_ident()
        if thread != self._thread:
            # The numbers of nodes of several threads cannot be compared: from now on only rows that never changed pass.
            self._mixed, self._thread = self._thread is not None, thread
            if self._mixed and self._new != -1:
                self._old = self._new = NEVER
        if version != self._version:
            first = self._version == -1
            self._old = NEVER if self._mixed else self._last
            self._new = NEVER if self._mixed else -1 if first else now
            self._version = version
        self._last = now
        if self._stale:
            self._stale.clear()

    def _check(self, version: int, *, wanted: bool) -> None:
        node = current_node()
        if node is None:  # a callback at the end of a backward pass
            return
        made = node._sequence_nr()
        known = self._version == version and made >= (self._old if saved_tensors_hooks(True) is None else self._new)
        if wanted:
            if not known or made in self._stale:
                raise RuntimeError(RECOMPUTED)
        elif not known or made in self._stale:
            self._stale.add(node_clock() - 1)
