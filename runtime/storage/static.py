"""A table of fixed size in one block of memory, its rows placed as the layout says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import TableLayout
from embforge.memory import ask_for_huge_pages
from embforge.storage.states import allocate_section, state_views

MADE = "_embforge_made"
"""A parameter's attribute: where the numbers of the last coalesced gradient made for it lie."""


class StaticTable(nn.Module):
    """Holds `weight`: `[rows, dim]` whose rows are `stride_elements` apart, and the states of a fused optimizer.

    Without a fused optimizer `weight` is a parameter. With one it is a plain tensor, and neither that nor a state is a
    parameter or buffer: nobody else may train, average or broadcast them. Every way in (`load_state_dict`, also with
    assign) and every move keeps the layout, because kernels have it compiled in. Casts of a whole model (`.half()`)
    leave the table's dtype alone: it is part of the spec.
    """

    weight: Tensor

    def __init__(
        self,
        layout: TableLayout,
        device: torch.device,
        *,
        fused: bool = False,
        initial: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.initial = dict(initial or {})
        """What states are before the first update, where that is not 0."""
        self.trainable = True
        """Of a fused table: whether a backward updates it."""
        rows = allocate(layout, device)
        self.weight = rows if fused else _parameter(rows)
        self.section = allocate_section(layout, device)

    def states(self) -> dict[str, Tensor]:
        """The optimizer's states by name, live."""
        return state_views(self.layout, self.weight.detach(), self.section)

    @torch.no_grad()
    def reset(self) -> None:
        """Rows drawn uniformly from +-1/sqrt(rows), as is usual for recommenders; fp8 from at least +-2^-6.

        States are what they are before the first update.
        """
        if self.weight.is_meta:
            return
        for name, state in self.states().items():
            state.fill_(self.initial.get(name, 0.0))
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
            self._take(self, device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticTable:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        skipped = ("_parameters", "weight", "section")
        twin.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skipped})
        twin._parameters = {}
        twin._take(self, self.weight.device)
        memo[id(self.weight)] = twin.weight
        return twin

    def _take(self, other: StaticTable, device: torch.device) -> None:
        """Rows and states of a table (maybe this one), copied to a device."""
        rows = allocate(self.layout, device)
        section = allocate_section(self.layout, device)
        if not other.weight.is_meta and not rows.is_meta:
            rows.copy_(other.weight.detach())
            old = other.states()
            for name, state in state_views(self.layout, rows, section).items():
                state.copy_(old[name])
        self.weight = _parameter(rows, other.weight) if isinstance(other.weight, nn.Parameter) else rows
        self.section = section

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "weight"] = weight.contiguous()
        for name, state in self.states().items():
            destination[f"{prefix}optim.{name}"] = state.contiguous()

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
        given: dict[str, Tensor] = {}
        for key, shape in self.keys(prefix).items():
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != shape:
                error_msgs.append(
                    f"{key}: shape {tuple(state_dict[key].shape)} does not fit table {self.layout.table.name!r} "
                    f"of {tuple(shape)}"
                )
            else:
                given[key] = state_dict[key]
        with torch.no_grad():
            weight = given.get(prefix + "weight")
            if weight is not None and local_metadata.get("assign_to_params_buffers", False):
                self._move_to(weight.device)
            targets = {prefix + "weight": self.weight.detach()}
            targets |= {f"{prefix}optim.{name}": state for name, state in self.states().items()}
            for key, tensor in given.items():
                if not targets[key].is_meta:
                    targets[key].copy_(tensor)

    def keys(self, prefix: str) -> dict[str, torch.Size]:
        """What the state dict holds of this table, and of which shape."""
        found = {prefix + "weight": self.weight.shape}
        return found | {f"{prefix}optim.{name}": state.shape for name, state in self.states().items()}

    def _move_to(self, device: torch.device) -> None:
        """Fresh memory on a device, for what `load_state_dict(assign=True)` brings: nobody else's tensor fits."""
        rows, section = allocate(self.layout, device), allocate_section(self.layout, device)
        self.weight = _parameter(rows, self.weight) if isinstance(self.weight, nn.Parameter) else rows
        self.section = section


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


def _parameter(rows: Tensor, like: Tensor | None = None) -> nn.Parameter:
    """fp8 has no gradients in torch: such tables are trained by a fused optimizer or not at all."""
    wanted = like.requires_grad if like is not None else rows.dtype.itemsize > 1
    parameter = nn.Parameter(rows, requires_grad=wanted)
    if wanted:
        parameter.register_post_accumulate_grad_hook(_say_coalesced)
    return parameter


def _say_coalesced(parameter: Tensor) -> None:
    """Autograd takes a first gradient over as it is, but forgets that it is coalesced: torch.optim would sort it."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse and gradient._values().data_ptr() == getattr(parameter, MADE, 0):
        gradient._coalesced_(True)


def note_made(parameter: Tensor, gradient: Tensor) -> None:
    """A coalesced gradient is on its way to a table."""
    setattr(parameter, MADE, gradient._values().data_ptr())
