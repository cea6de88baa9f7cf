"""The row of each id, for tables whose ids are not their rows (`TableSpec.remap`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from embforge.chosen_device import device_after
from embforge.codegen.spec import NO_ROW, CollectionSpec, TableSpec
from embforge.input_forms import as_tensor

UNKNOWN = -2
"""Fills the entries of a remap until they are set or loaded."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Remap(nn.Module):
    """Maps the ids of one table to rows by its `entries`: int64 `[ids]`, the row of each id, -1 for an id without row.

    The entries are a buffer, which moves with the module and is in its state dict. Until they are set or loaded, the
    table cannot be looked up: which row an id has is a fact about the data, for which there is no sound default.
    """

    entries: Tensor

    def __init__(self, table: TableSpec, device: torch.device) -> None:
        super().__init__()
        self.table = table
        self._known: ReferenceType[Tensor] | None = None
        """The entries that were seen to be known. Others may take their place, e.g. in a functional call."""
        self.register_buffer("entries", _unknown(table, device))

    @property
    def is_known(self) -> bool:
        """Whether all entries have been set, loaded or written. It reads them in every call until they have been."""
        if self._was_known:
            return True
        if not self.entries.is_meta and not bool((self.entries == UNKNOWN).any()):
            self._known = ref(self.entries)
        return self._was_known

    @property
    def _was_known(self) -> bool:
        """Whether the present entries were known in an earlier call. It does not read them."""
        return self._known is not None and self._known() is self.entries

    def set(self, new_entries: Any) -> None:
        """Copies entries from a tensor, an array or a list. ValueError or TypeError names what is wrong with them."""
        self._replace(checked_entries(self.table, new_entries))

    def load(self, saved: Any) -> None:
        """Copies entries of a state dict, which may be those of a module whose entries were not known."""
        self._replace(loaded_entries(self.table, saved))

    def _replace(self, entries: Tensor) -> None:
        if self.entries.is_meta:
            raise ValueError(
                f"remap of table {self.table.name!r}: the module is on the meta device, where entries would be lost; "
                "set them after to_empty(), or load a state dict with assign=True"
            )
        with torch.no_grad():
            self.entries.copy_(entries)
        self._known = None if entries.is_meta or _are_unknown(entries) else ref(self.entries)

    def move_to(self, device: torch.device) -> None:
        """Moves the entries to a device. Entries that come from the meta device are unknown afterwards."""
        if device == self.entries.device:
            return
        known = self.is_known and device.type != "meta"
        with torch.inference_mode(False):  # a tensor made in inference mode could never be written again
            self.entries = self.entries.to(device) if known else _unknown(self.table, device)

    def check(self) -> None:
        """Raises RuntimeError unless the entries have been set or loaded."""
        name = self.table.name
        if torch.compiler.is_compiling():  # a graph cannot depend on what entries are, and has tensors of its own
            if self._known is None and not self.entries.is_meta:
                raise RuntimeError(
                    f"table {name!r}: a graph is made before it is known which rows the {self.table.remap} ids have; "
                    f"call set_remap({name!r}, entries), or the module itself, before it is compiled or exported"
                )
        elif not self.is_known and not self.entries.is_meta:
            raise RuntimeError(
                f"table {name!r}: which rows its {self.table.remap} ids have is not known yet; make the module with "
                f"remap={{{name!r}: entries}}, call set_remap({name!r}, entries), or load a state dict that has them"
            )

    def extra_repr(self) -> str:
        return f"{self.entries.numel():,} ids" + ("" if self.is_known else ", rows not set yet")

    def _apply(self, fn: Any, recurse: bool = True) -> Remap:
        self.move_to(device_after(fn, self.entries))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}entries"] = self.entries  # unknown ones too: checkpoints are loaded into what is here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # a weak reference cannot be copied

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
            entries = loaded_entries(self.table, state_dict[key])
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{key}: {error}")
            return
        # With assign=True the table has moved to the device of its new rows, and its entries move with it.
        if self.entries.is_meta and local_metadata.get("assign_to_params_buffers", False):
            self.move_to(entries.device)
        if not self.entries.is_meta and not entries.is_meta:
            self.load(entries)


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


def loaded_entries(table: TableSpec, saved: Any) -> Tensor:
    """The entries of a state dict: `checked_entries`, or unknown ones if the module that saved them had no others."""
    if isinstance(saved, Tensor) and saved.shape == (table.num_ids,) and not saved.is_meta and _are_unknown(saved):
        return saved
    return checked_entries(table, saved)


def _are_unknown(entries: Tensor) -> bool:
    return entries.dtype == torch.int64 and entries.layout is torch.strided and bool((entries == UNKNOWN).all())


def checked_entries(table: TableSpec, new_entries: Any) -> Tensor:
    """The entries as an int64 tensor. ValueError or TypeError names what is wrong with them."""
    entries = as_tensor(new_entries)
    where = f"remap of table {table.name!r}"
    if isinstance(entries, list | tuple):
        try:
            entries = as_tensor(np.asarray(entries, dtype=None if entries else np.int64))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{where}: {error}; allowed: whole numbers, one for each id") from None
    if not isinstance(entries, Tensor) or entries.dtype not in INTEGERS:
        got = entries.dtype if isinstance(entries, Tensor) else type(new_entries).__name__
        raise TypeError(f"{where}: got {got}; allowed: whole numbers, as a tensor of torch.int64")
    if entries.layout is not torch.strided or entries.is_nested:
        raise TypeError(f"{where}: got a tensor that is sparse or nested; allowed: a dense one, an entry for each id")
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
