"""The entry of state dicts that says which rule a table's states belong to: `tables.<name>.optim.rule.name`.

Two rules may keep states with the same names and shapes but different meanings, as Adam and LAMB do. The entry is a
tensor, so that every format of tensors keeps it (torch.save, torch.distributed.checkpoint, safetensors). Its size is
always the same, because some of these formats load in place. The name of a state has no dot, so no state has this key.
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
"""The size of an entry. No rule's name is as long."""
VERSION = 1
"""The version of the meaning of states. It is raised when a rule gives a state another meaning under the same name."""


def rule_entry(rule: str) -> Tensor:
    """The entry for the states of the rule with this name."""
    text = f"{rule}/{VERSION}".encode()
    return torch.frombuffer(bytearray(text.ljust(BYTES, b"\0")), dtype=torch.uint8)


def wrong_rule(key: str, entry: Any, rule: str) -> str | None:
    """An error message if `entry` says that the states belong to a rule other than `rule`, which trains the table.

    None if they belong to it, or if the entry is on the meta device.
    """
    if isinstance(entry, Tensor) and entry.is_meta:
        return None
    if not isinstance(entry, Tensor) or entry.dtype != torch.uint8 or entry.dim() != 1:
        return f"{key}: {type(entry).__name__} is not allowed; allowed: the uint8 tensor that state_dict() wrote"
    saved = bytes(entry.tolist()).rstrip(b"\0").decode(errors="replace")
    if saved == f"{rule}/{VERSION}":
        return None
    return (
        f"{key}: these are states of the optimizer {saved!r}, the module's is '{rule}/{VERSION}'; make the module with "
        "the optimizer that was saved, or load only the rows: remove all entries with 'optim.' and pass strict=False"
    )


def check_keys(keys: Iterable[str]) -> None:
    """Raises `SpecError` if two tensors would have the same key in state dicts.

    For example, a table `a` whose optimizer has a state `weight`, and the rows of a table `a.optim`.
    """
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise SpecError(
            f"two tensors would be called {twice[0]!r} in state dicts: the rows of one table, and a state of the "
            "optimizer of another; rename one of the tables, or the state"
        )
