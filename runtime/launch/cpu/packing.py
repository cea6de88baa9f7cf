"""Packs the arguments of a CPU kernel, passed by name, into the words that its `_words` entry reads."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

from embforge.codegen.kernel import arguments_of


@cache
def packer_of(target: str, kernel: str) -> Callable[..., bytes]:
    """Returns a function that takes the arguments of an op or stage by name and packs them in the kernel's order.

    That function raises TypeError if an argument is missing or the kernel does not have it.
    """
    names = [argument.name for argument in arguments_of(target, kernel)]
    # Each kernel gets its own function, made from text as namedtuple does: Python then matches the names, which takes
    # an eighth of a microsecond for ten arguments. Looking them up in a dict would take one microsecond.
    source = f"lambda *, {', '.join(names)}: pack({', '.join(names)})"
    packer: Callable[..., bytes] = eval(source, {"pack": struct.Struct(f"{len(names)}q").pack})  # native order
    return packer
