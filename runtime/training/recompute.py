"""Whether a forward that a backward pass repeats (torch.utils.checkpoint) reads the rows that it read at first."""

from __future__ import annotations

from threading import get_ident

import torch

from embforge.torch_internals import current_node, current_pass, node_clock, saved_tensors_hooks

RECOMPUTED = (
    "a recomputed forward (torch.utils.checkpoint) would read rows that were updated since the first forward, and so "
    "give other numbers; use accumulate=True, which updates in step(), or call the module outside of the checkpointed "
    "function. (Where several threads call the module, this is refused after the first update.)"
)

_gradients_on = torch.is_grad_enabled  # named once: note() is part of every eager call

NEVER = 2**64
"""Later than any node: autograd's own mark of a node that runs first is 2^64 - 1."""


class Forwards:
    """When a module's forwards ran, and on which version of its rows.

    The clock is autograd's: nodes are numbered as they are made, thread by thread. A repeated forward is known by the
    node in whose backward it runs:

    - With `use_reentrant=True`, and in functions like it, that node was made just before the first forward. So no
      forward since the node was made may have seen other rows than there are now.
    - Else it is a node behind the first forward, whose saved tensors are asked for (through hooks, by which the two are
      told apart). So rows must be what they are now since before the node was made.

    Forwards without gradients inside of a backward pass are reads of whoever wants to look, and are never refused. They
    may also be first forwards of a checkpoint within a checkpoint: if rows are not what they were, it may not be
    repeated.
    """

    def __init__(self) -> None:
        self._version = -1
        self._old = -1  # when a forward last saw another version
        self._new = -1  # when one first saw this version
        self._last = -1
        self._thread: int | None = None
        self._mixed = False
        self._stale: set[int] = set()

    def note(self, version: int, *, in_node: bool = False) -> None:
        """A forward is about to run. RuntimeError if it is repeated and rows are not what they were.

        `in_node`: it runs within the forward of an autograd node, as that of a compiled graph: gradients are off there
        though they are wanted, and the node, which has its number already, is what may be asked for saved tensors.
        """
        if current_pass() != -1:
            self._check(version, wanted=in_node or _gradients_on())
            return
        now, thread = node_clock() - in_node, get_ident()
        if thread != self._thread:
            # Clocks of several threads cannot be compared: from here on only rows that never changed are known.
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
