"""A table of fixed size in one block of memory, its rows placed as the layout says."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import TableLayout
from embforge.memory import ask_for_huge_pages


class StaticTable(nn.Module):
    """Holds `weight`: a `[rows, dim]` parameter whose rows are `stride_elements` apart.

    Every way in (`load_state_dict`, also with assign) and every move keeps the layout, because kernels have
    it compiled in. Casts of a whole model (`.half()`) leave the table's dtype alone: it is part of the spec.
    """

    weight: nn.Parameter

    def __init__(self, layout: TableLayout, device: torch.device) -> None:
        super().__init__()
        self.layout = layout
        self.weight = _parameter(allocate(layout, device))

    @torch.no_grad()
    def reset(self) -> None:
        """Rows drawn uniformly from +-1/sqrt(rows), as is usual for recommenders; fp8 from at least +-2^-6."""
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.layout.table.num_embeddings)
        if self.weight.dtype.itemsize > 1:
            self.weight.uniform_(-bound, bound)
            return
        bound = max(bound, 2**-6)  # fp8 has no numbers between 0 and 2^-9
        for rows in self.weight.split(1 << 16):  # torch draws no fp8: convert a slice at a time
            rows.copy_(torch.empty(rows.shape, device=rows.device).uniform_(-bound, bound))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StaticTable:
        # Asked of no rows, fn tells where it would move the table without moving it (and without casting it).
        device = fn(self.weight.data[:0]).device
        if device != self.weight.device:
            self.weight = _parameter(_copy_to(self.weight.data, self.layout, device), like=self.weight)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticTable:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_parameters"})
        copied = _parameter(_copy_to(self.weight.data, self.layout, self.weight.device), like=self.weight)
        memo[id(self.weight)] = copied
        twin._parameters = {"weight": copied}
        return twin

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "weight"] = weight.contiguous()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        given = state_dict.get(key)
        if given is None:
            missing_keys.append(key)
            return
        if given.shape != self.weight.shape:
            error_msgs.append(
                f"{key}: shape {tuple(given.shape)} does not fit table {self.layout.table.name!r} "
                f"of {tuple(self.weight.shape)}"
            )
            return
        with torch.no_grad():
            if local_metadata.get("assign_to_params_buffers", False):
                self.weight = _parameter(_copy_to(given, self.layout, given.device), like=self.weight)
            else:
                self.weight.copy_(given)


def allocate(layout: TableLayout, device: torch.device) -> Tensor:
    """Uninitialised rows of a table; the padding between rows, if any, is zero."""
    table = layout.table
    dtype = getattr(torch, DTYPES[table.dtype].torch_name)
    block = torch.empty((table.num_embeddings, layout.stride_elements), dtype=dtype, device=device)
    if block.is_cpu:
        ask_for_huge_pages(block)
    rows = block[:, : table.embedding_dim]
    if layout.stride_elements > table.embedding_dim and not block.is_meta:
        block[:, table.embedding_dim :].view(torch.uint8).zero_()
    return rows


def _copy_to(source: Tensor, layout: TableLayout, device: torch.device) -> Tensor:
    target = allocate(layout, device)
    if not source.is_meta and not target.is_meta:
        target.copy_(source)
    return target


def _parameter(rows: Tensor, like: nn.Parameter | None = None) -> nn.Parameter:
    return nn.Parameter(rows, requires_grad=like.requires_grad if like is not None else False)
