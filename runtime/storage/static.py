"""A table of fixed size in one block of memory, with its rows where the layout says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from embforge.chosen_device import device_after
from embforge.codegen.layout import TableLayout
from embforge.codegen.reading.numbers import size
from embforge.memory import ask_for_huge_pages
from embforge.number_formats import torch_computes, torch_dtype
from embforge.pickle_layout import with_layout, without_layout
from embforge.storage.common import NO_RULE, NO_TORCH_GRADIENT, starting_bound
from embforge.storage.padded_parameters import guard_padded
from embforge.storage.remap import Remap
from embforge.storage.rule_entry import ENTRY, rule_entry, wrong_rule
from embforge.storage.states import allocate_section, state_views, versioned
from embforge.torch_internals import has_gradient_hooks, sparse_values

COALESCED_ADDRESS = "_embforge_coalesced_address"
"""Name of a parameter's attribute: the address of the values of a coalesced gradient that is about to be stored."""


class StaticTable(nn.Module):
    """A table with a fixed number of rows.

    It holds `weight`: `[rows, dim]` whose rows start `stride_elements` apart, and the states of a fused optimizer.
    Without a fused optimizer `weight` is a parameter. With one it is a plain tensor, and neither it nor a state is a
    parameter or buffer, because torch's optimizers, averages and broadcasts must not change them. Loading
    (`load_state_dict`, also with assign=True) and moving keep the layout, because it is compiled into kernels. Casts of
    a whole model (`.half()`) leave the table's dtype unchanged: it is part of the spec.
    """

    weight: Tensor
    block: Tensor
    """Only if a fused optimizer trains the table: `[rows, stride_elements]`, the rows with their padding and the states
    in it. Compiled graphs take it instead of `weight`, because a copy of `weight` would lose the padding."""
    sparse: bool = False
    """Whether the gradient is sparse. A table with a fused optimizer has no gradient."""
    remap: Remap | None
    """The row of each id; None where ids are rows."""

    def __init__(
        self,
        layout: TableLayout,
        device: torch.device,
        *,
        fused: bool = False,
        initial: Mapping[str, float] | None = None,
        has_rule: bool = True,
        remap: Remap | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not super(): ParameterTable also derives from nn.Embedding, which makes rows itself
        self.layout = layout
        self.remap = remap
        self.initial = dict(initial or {})
        """The values of states before the first update, by name; other states start at 0."""
        self._has_rule = has_rule
        """Whether an optimizer was chosen for the table. Without a fused optimizer it means nothing."""
        self.trainable = has_rule
        """Whether a backward updates the table. Without a fused optimizer, `weight.requires_grad` says so."""
        if fused:
            self._hold(allocate_block(layout, device), allocate_section(layout, device))
        else:
            self.weight = _parameter(allocate(layout, device))
            self.section = allocate_section(layout, device)

    def _hold(self, block: Tensor, section: Tensor) -> None:
        self.block, self.section = block, section
        previous = self.__dict__.get("weight")
        self.weight = block[:, : self.layout.table.embedding_dim]
        if previous is not None:  # attributes that the module has set on its rows are true of the new rows too
            self.weight.__dict__.update(previous.__dict__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        table, layout = self.layout.table, self.layout
        text = f"{table.num_embeddings:,} x {table.embedding_dim} {table.dtype}, {size(layout.table_bytes)}"
        text += f", {size(self.section.nbytes)} of optimizer states" if self.section.nbytes else ""
        return text if self.remap is None else f"{text}, {self.remap.extra_repr()}"

    def states(self) -> dict[str, Tensor]:
        """Live views of the optimizer's states, by name."""
        return state_views(self.layout, self.weight, self.section) if self.is_fused else {}

    @property
    def is_fused(self) -> bool:
        """Whether a fused optimizer trains the table."""
        return "block" in self.__dict__

    def set_trainable(self, wanted: bool) -> None:
        """Sets whether a backward updates the table, or gives it a gradient. TypeError if nothing can train it."""
        if wanted and not self.can_train():
            raise TypeError(f"table {self.layout.table.name!r}: {NO_RULE if self.is_fused else NO_TORCH_GRADIENT}")
        if not self.is_fused:
            self.weight.requires_grad_(wanted)
            _add_gradient_hook(self.weight)
        self.trainable = wanted

    def requires_grad_(self, requires_grad: bool = True) -> StaticTable:
        """Does what `set_trainable` does, also for a table with a fused optimizer, which has no parameter."""
        self.set_trainable(requires_grad)
        return self

    def is_trained(self) -> bool:
        """Whether the table is trained, that is, not frozen."""
        return self.trainable if self.is_fused else self.weight.requires_grad

    @property
    def has_rule(self) -> bool:
        """Whether a fused optimizer trains the table unless it is frozen."""
        return self.is_fused and self._has_rule

    def can_train(self) -> bool:
        """Whether a fused optimizer, or one of torch, can train the table."""
        return self._has_rule if self.is_fused else torch_computes(self.weight.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        """Draws new rows uniformly from within `starting_bound`, as is usual for recommenders, and resets states to
        their values before the first update."""
        if self.weight.is_meta:
            return
        for name, state in self.states().items():
            state.fill_(self.initial.get(name, 0.0))
        bound = starting_bound(self.layout.table)
        if torch_computes(self.weight.dtype):
            self.weight.uniform_(-bound, bound)
            return
        for rows in self.weight.split(1 << 16):  # drawn in fp32 and converted, slice by slice
            drawn = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
            rows.copy_(drawn.uniform_(-bound, bound))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StaticTable:
        # Applied to no rows, fn shows where it would move the table, without moving or casting it.
        device = device_after(fn, self.weight.data)
        if device != self.weight.device:
            self.take_rows(self, device)
        if self.remap is not None:
            self.remap.move_to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticTable:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        skipped = ("_parameters", "weight", "section", "block")
        twin.__dict__.update({k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skipped})
        twin._parameters = {}
        twin.take_rows(self, self.weight.device)
        memo[id(self.weight)] = twin.weight
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # With a fused optimizer, weight is a view of block, and is made again from it.
        return with_layout({key: value for key, value in self.__dict__.items() if key != "weight"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, without_layout(state))
        if self.is_fused:
            self._hold(versioned(self.block), versioned(self.section))
        else:
            _add_gradient_hook(self.weight)  # hooks are not pickled

    def take_rows(self, other: StaticTable, device: torch.device) -> None:
        """Moves this table to a device, with the rows and states of `other`, which may be this table."""
        rows, states, known = other.weight.detach(), other.states(), not other.weight.is_meta
        self._move_to(device, like=other)
        if known and not self.weight.is_meta:
            self.weight.detach().copy_(rows)
            for name, state in self.states().items():
                state.copy_(states[name])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "weight"] = weight.contiguous()
        for name, state in self.states().items():
            destination[f"{prefix}optim.{name}"] = state.contiguous()
        if self.states():
            destination[prefix + ENTRY] = rule_entry(self.layout.rule)

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
        fitting: dict[str, Tensor] = {}
        rule = state_dict.get(prefix + ENTRY)  # older state dicts do not have it
        wrong = wrong_rule(prefix + ENTRY, rule, self.layout.rule) if rule is not None and self.states() else None
        if wrong is not None:
            error_msgs.append(wrong)
        for key, shape in self.keys(prefix).items():
            if wrong is not None and key != prefix + "weight":
                continue
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != shape:
                error_msgs.append(
                    f"{key}: shape {tuple(state_dict[key].shape)} does not fit table {self.layout.table.name!r} "
                    f"of {tuple(shape)}"
                )
            else:
                fitting[key] = state_dict[key]
        with torch.no_grad():
            weight = fitting.get(prefix + "weight")
            assign = local_metadata.get("assign_to_params_buffers", False)
            # Rows are always copied. A table with a fused optimizer keeps its memory if it can, because a backward that
            # has not run yet updates the rows at the address that its forward read.
            if weight is not None and assign and not (self.is_fused and weight.device == self.weight.device):
                self._move_to(weight.device, like=self)
                if self.remap is not None:
                    self.remap.move_to(weight.device)
            targets = {prefix + "weight": self.weight.detach()}
            targets |= {f"{prefix}optim.{name}": state for name, state in self.states().items()}
            for key, tensor in fitting.items():
                if not targets[key].is_meta:
                    targets[key].copy_(tensor)

    def keys(self, prefix: str) -> dict[str, torch.Size]:
        """The keys of rows and states in a state dict, with their shapes."""
        shapes = {prefix + "weight": self.weight.shape}
        return shapes | {f"{prefix}optim.{name}": state.shape for name, state in self.states().items()}

    def all_keys(self, prefix: str) -> set[str]:
        """All keys that a state dict may have for this table."""
        keys = set(self.keys(prefix))
        keys |= {prefix + ENTRY} if self.states() else set()
        return keys if self.remap is None else keys | {f"{prefix}remap.entries"}

    def _move_to(self, device: torch.device, like: StaticTable) -> None:
        """Allocates new memory on a device. `load_state_dict(assign=True)` needs it too: tensors that are not ours do
        not have the table's layout."""
        if like.is_fused:
            self._hold(allocate_block(self.layout, device), allocate_section(self.layout, device))
        else:
            self.weight = _parameter(allocate(self.layout, device), like.weight)
            self.section = allocate_section(self.layout, device)


def allocate(layout: TableLayout, device: torch.device) -> Tensor:
    """Uninitialised rows of a table; the padding between rows, if any, is zero."""
    return allocate_block(layout, device)[:, : layout.table.embedding_dim]


def allocate_block(layout: TableLayout, device: torch.device) -> Tensor:
    """All memory of a table: rows with their padding."""
    table = layout.table
    dtype = torch_dtype(table.dtype)
    with torch.inference_mode(False):  # a tensor made in inference mode has no version, by which changes are known
        block = torch.empty((table.num_embeddings, layout.stride_elements), dtype=dtype, device=device)
    if block.is_cpu:
        ask_for_huge_pages(block)
    if layout.stride_elements > table.embedding_dim and not block.is_meta:
        block[:, table.embedding_dim :].view(torch.uint8).zero_()
    return block


def _parameter(rows: Tensor, like: Tensor | None = None) -> nn.Parameter:
    """Rows as a parameter. It wants gradients as `like` does, or if torch has gradients of its number format."""
    wanted = like.requires_grad if like is not None else torch_computes(rows.dtype)
    parameter = nn.Parameter(rows, requires_grad=wanted)
    _add_gradient_hook(parameter)
    return parameter


def _add_gradient_hook(parameter: Tensor) -> None:
    """Makes a parameter that wants gradients mark coalesced ones as such, and refuse torch's fused optimizers if its
    rows have padding between them."""
    if parameter.requires_grad and not has_gradient_hooks(parameter):
        parameter.register_post_accumulate_grad_hook(_mark_as_coalesced)
        guard_padded(parameter)


def _mark_as_coalesced(parameter: Tensor) -> None:
    """Marks a gradient that is known to be coalesced. Autograd stores a first gradient without a copy, but forgets that
    it is coalesced, and torch.optim would sort it."""
    gradient, address = parameter.grad, parameter.__dict__.pop(COALESCED_ADDRESS, None)
    if gradient is not None and gradient.is_sparse and sparse_values(gradient).data_ptr() == address:
        gradient._coalesced_(True)


def note_coalesced(parameter: Tensor, gradient: Tensor) -> None:
    """Remembers that a gradient which autograd is about to store in a parameter is coalesced."""
    setattr(parameter, COALESCED_ADDRESS, sparse_values(gradient).data_ptr())
