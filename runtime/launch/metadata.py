"""What kernels know of the tables: one int64 tensor, rebuilt only when storage moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embforge.codegen.signature import METADATA_WORDS

UNCHECKED_ROWS = -1
"""As an unsigned number no id reaches it."""


@dataclass(frozen=True)
class Metadata:
    """`words`: int64 `[tables, METADATA_WORDS]` on the tables' device, valid while the addresses are."""

    addresses: tuple[int, ...]
    words: Tensor
    pointer: int


def metadata_of(tables: Sequence[Tensor], bounds_check: str) -> Metadata:
    """The metadata of tables as they lie now."""
    addresses = tuple(map(Tensor.data_ptr, tables))
    checked = bounds_check != "unchecked"
    facts = [
        {"address": address, "rows": table.shape[0] if checked else UNCHECKED_ROWS}
        for address, table in zip(addresses, tables, strict=True)
    ]
    words = torch.tensor([[fact[word] for word in METADATA_WORDS] for fact in facts], dtype=torch.int64)
    words = words.to(tables[0].device)
    return Metadata(addresses, words, words.data_ptr())
