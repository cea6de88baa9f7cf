"""The row of each id, for tables whose ids are not their rows (`TableSpec.remap`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embforge.chosen_device import device_after
from embforge.codegen.spec import NO_ROW, CollectionSpec, TableSpec
from embforge.input_forms import as_tensor

UNKNOWN = -2
"""Fills the entries of a remap until they are set or loaded."""


class Remap(nn.Module):
    """Maps the ids of one table to rows by its `entries`: int64 `[ids]`, the row of each id, -1 for an id without row.

    The entries are a buffer, which moves with the module and is in its state dict. Until they are set or loaded, the
    table cannot be looked up: which row an id has is a fact about the data, for which there is no sound default.
    """

    entries: Tensor

    def __init__(self, table: TableSpec, device: torch.device) -> None:
        super().__init__()
        self.table = table
        self._was_known = False
        self.register_buffer("entries", _unknown(table, device))

    @property
    def is_known(self) -> bool:
        """Whether the entries have been set, loaded or written. It reads them in every call until they have been."""
        if not self._was_known and not self.entries.is_meta:
            self._was_known = bool((self.entries != UNKNOWN).any())
        return self._was_known

    def set(self, new_entries: Any) -> None:
        """Copies entries from a tensor, an array or a list. ValueError or TypeError names what is wrong with them."""
        entries = checked_entries(self.table, new_entries)
        if self.entries.is_meta:
            raise ValueError(
                f"remap of table {self.table.name!r}: the module is on the meta device, where entries would be lost; "
                "set them after to_empty(), or load a state dict with assign=True"
            )
        with torch.no_grad():
            self.entries.copy_(entries)
        self._was_known = not entries.is_meta

    def move_to(self, device: torch.device) -> None:
        """Moves the entries to a device. Entries that come from the meta device are unknown afterwards."""
        if device == self.entries.device:
            return
        known = self.is_known and device.type != "meta"
        with torch.inference_mode(False):  # a tensor made in inference mode could never be written again
            self.entries = self.entries.to(device) if known else _unknown(self.table, device)
        self._was_known = known

    def check(self) -> None:
        """Raises RuntimeError unless the entries have been set or loaded."""
        if not self.is_known and not self.entries.is_meta:
            raise RuntimeError(
                f"table {self.table.name!r}: which rows its {self.table.remap} ids have is not known yet; make the "
                f"module with remap={{{self.table.name!r}: entries}}, call set_remap({self.table.name!r}, entries), or "
                "load a state dict that has them"
            )

    def extra_repr(self) -> str:
        return f"{self.entries.numel():,} ids" + ("" if self.is_known else ", rows not set yet")

    def _apply(self, fn: Any, recurse: bool = True) -> Remap:
        self.move_to(device_after(fn, self.entries))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.is_known or self.entries.is_meta:
            destination[f"{prefix}entries"] = self.entries

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}entries"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            entries = checked_entries(self.table, state_dict[key])
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{key}: {error}")
            return
        # With assign=True the table has moved to the device of its new rows, and its entries move with it.
        if self.entries.is_meta and local_metadata.get("assign_to_params_buffers", False):
            self.move_to(entries.device)
        if not self.entries.is_meta and not entries.is_meta:
            self.set(entries)


class RemappedModule:
    """A module that may have remapped tables. It lets a user read and set their remaps."""

    spec: CollectionSpec

    @abstractmethod
    def remaps(self) -> dict[str, Remap]:
        """The remaps by table name, for tables that have one."""

    def remap(self, table: str) -> Tensor:
        """The row of each id of a remapped table, `[ids]`; -1 for an id without row.

        The tensor is live: writing to it changes the remap. It is not valid after the module moves.
        """
        return remap_named(self.spec, self.remaps(), table).entries

    def set_remap(self, table: str, entries: Any) -> None:
        """Sets which row each id of a remapped table has: int64 `[ids]`, -1 for an id without row.

        All ranks of a sharded module must set, or load, the same entries.
        """
        remap_named(self.spec, self.remaps(), table).set(entries)


def digests_of(remaps: Mapping[str, Remap]) -> dict[str, str]:
    """A digest of each remap, by table: equal digests mean equal entries. Empty for entries that are not known yet."""
    return {
        name: sha256(remap.entries.cpu().numpy().data).hexdigest() if remap.is_known else ""
        for name, remap in remaps.items()
    }


def new_remaps(spec: CollectionSpec, device: torch.device) -> dict[str, Remap]:
    """A new remap for each table that needs one. Their entries are unknown."""
    return {table.name: Remap(table, device) for table in spec.tables if not table.ids_are_rows}


def set_remaps(spec: CollectionSpec, remaps: Mapping[str, Remap], entries_of: Mapping[str, Any] | None) -> None:
    """Sets the entries of the tables that `entries_of` names. ValueError for a table that has no remap."""
    if entries_of is not None and not isinstance(entries_of, Mapping):
        raise TypeError(f"remap: got {type(entries_of).__name__}; allowed: a mapping from tables to the row of each id")
    for name, entries in (entries_of or {}).items():
        remap_named(spec, remaps, name).set(entries)


def remap_named(spec: CollectionSpec, remaps: Mapping[str, Remap], table: str) -> Remap:
    """A table's remap. SpecError for an unknown table, ValueError for a table whose ids are its rows."""
    spec.table(table)
    if table not in remaps:
        allowed = f"allowed: {', '.join(map(repr, remaps))}" if remaps else "no table of the spec has one"
        raise ValueError(f"table {table!r} has no remap: its ids are its rows; {allowed}; see TableSpec.remap")
    return remaps[table]


def checked_entries(table: TableSpec, new_entries: Any) -> Tensor:
    """The entries as an int64 tensor. ValueError or TypeError names what is wrong with them."""
    entries = as_tensor(new_entries)
    where = f"remap of table {table.name!r}"
    if isinstance(entries, list | tuple):
        try:
            entries = as_tensor(np.asarray(entries))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{where}: {error}; allowed: whole numbers, one for each id") from None
    if not isinstance(entries, Tensor) or entries.dtype not in (torch.int32, torch.int64):
        got = entries.dtype if isinstance(entries, Tensor) else type(new_entries).__name__
        raise TypeError(f"{where}: got {got}; allowed: a tensor of torch.int64 or torch.int32")
    if entries.shape != (table.num_ids,):
        raise ValueError(f"{where}: shape {tuple(entries.shape)}; allowed: ({table.num_ids},), an entry for each id")
    entries = entries.long()
    if entries.is_meta:
        return entries
    wrong = ((entries < NO_ROW) | (entries >= table.num_embeddings)).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"{where}: entry {at} is {int(entries[at])}; allowed: a row, 0 to {table.num_embeddings - 1}, or -1 for an "
            "id without one"
        )
    return entries


def _unknown(table: TableSpec, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((table.num_ids,), UNKNOWN, dtype=torch.int64, device=device)
