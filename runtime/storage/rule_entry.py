"""Which optimizer the states of a table are of, as an entry of state dicts: `tables.<name>.optim.rule.name`.

Rules may keep states of the same names and shapes (Adam and LAMB do), which mean something else. The entry is a tensor,
so that it survives whatever keeps tensors (torch.save, torch.distributed.checkpoint, safetensors), and is always of one
size, because some of these load in place. No state's name holds a dot, so the key is no state's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import SpecError

ENTRY = "optim.rule.name"
BYTES = 64
"""More than any rule's name has."""
VERSION = 1
"""The version of what states mean. Raised with a rule that means something else by a state of the same name."""


def rule_entry(rule: str) -> Tensor:
    """The entry for states of a rule of that name."""
    text = f"{rule}/{VERSION}".encode()
    return torch.frombuffer(bytearray(text.ljust(BYTES, b"\0")), dtype=torch.uint8)


def wrong_rule(key: str, entry: Any, rule: str) -> str | None:
    """What is wrong with states that come with such an entry, for a table that this rule trains."""
    if isinstance(entry, Tensor) and entry.is_meta:
        return None
    if not isinstance(entry, Tensor) or entry.dtype != torch.uint8 or entry.dim() != 1:
        return f"{key}: {type(entry).__name__} is not allowed; allowed: the uint8 tensor that a state dict has there"
    saved = bytes(entry.tolist()).rstrip(b"\0").decode(errors="replace")
    if saved == f"{rule}/{VERSION}":
        return None
    return (
        f"{key}: these are states of the optimizer {saved!r}, the module's is '{rule}/{VERSION}'; make the module with "
        "the one that was saved, or load the rows alone: leave out all entries with 'optim.', with strict=False"
    )


def check_keys(keys: Iterable[str]) -> None:
    """`SpecError` if two tensors would have one key in state dicts, as those of a table `a` whose optimizer has a state
    `weight` and of a table `a.optim`."""
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise SpecError(
            f"two tensors would be called {twice[0]!r} in state dicts: the rows of one table, and a state of the "
            "optimizer of another; rename one of the tables, or the state"
        )
