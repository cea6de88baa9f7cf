"""Packs the arguments of a CPU kernel, given by name, into the words that its `_words` entry reads."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from embforge.codegen.kernel import arguments_of


@cache
def packer_of(target: str, kernel: str) -> Callable[..., bytes]:
    """A function from an op's or a stage's arguments, by their names, to words in the kernel's order.

    TypeError for a name that is missing or that the kernel does not have.
    """
    names = [argument.name for argument in arguments_of(target, kernel)]
    # A function of its own for each kernel, as namedtuple makes them: Python matches the names, which costs a call of
    # ten arguments an eighth of a microsecond. A dict of them would cost one.
    source = f"lambda *, {', '.join(names)}: pack({', '.join(names)})"
    packer: Callable[..., bytes] = eval(source, {"pack": struct.Struct(f"{len(names)}q").pack})  # native order
    return packer
