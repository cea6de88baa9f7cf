"""What a rank's state dict holds of a sharded collection: its own shards, without the rows that only pad them.

tables.<table>.weight              tables.<table>.optim.<state>           of a table that the rank holds as a whole
tables.<table>[1::3,0:4].weight    tables.<table>[1::3,0:4].optim.<state>     of a part: its rows and columns
tables.<table>.optim.rule.name     of each of these: whose states they are
optim.step, optim.seed             replicated.optim.step, replicated.optim.seed

A key says what its tensor is, whatever the rank: equal keys of two ranks hold equal tensors, and different shards have
different keys. torch.distributed.checkpoint, which takes tensors with one key for copies, relies on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embforge.codegen.rules.rule import State
from embforge.codegen.sharding.geometry import Geometry, piece_name
from embforge.codegen.sharding.placement import Piece, Rows, TablePlacement
from embforge.sharded.exchange.collectives import Ranks
from embforge.sharded.norms import given_rule
from embforge.storage.rule_entry import ENTRY, check_keys, rule_entry, wrong_rule
from embforge.storage.static import StaticTable
from embforge.training.trained import _wrong_counter

SHARD = "embforge_shard"
"""Key of a state dict's metadata: whose shards it holds."""


class HeldTable(NamedTuple):
    """A table of a rank's own: a shard, or a replica."""

    name: str
    """The whole table's."""
    key: str
    """What its entries in the state dict begin with."""
    table: StaticTable
    rows: int
    """How many of its rows are rows of the table."""


class HeldShards(nn.Module, ABC):
    """A module whose tables are neither parameters nor buffers nor modules: nobody may broadcast, average or split
    them."""

    geometry: Geometry
    plan: Any
    _ranks: Ranks
    _device: torch.device

    @abstractmethod
    def _table(self, name: str) -> StaticTable:
        """A table of this rank's own collection, or a replicated one."""

    @abstractmethod
    def _parts_trained(self) -> dict[str, Any]:
        """The collections that hold rows here, by what a state dict puts before their counters."""

    @abstractmethod
    def states_of(self, table: str) -> tuple[State, ...]:
        """The states of a table's optimizer, as the user gave it."""

    def held_tables(self) -> Iterator[HeldTable]:
        """What this rank holds."""
        rank = self._ranks.rank
        for placed in self.geometry.placement.tables:
            name = placed.table.name
            if placed.replicated:
                yield HeldTable(name, f"tables.{name}", self._table(name), placed.table.num_embeddings)
            for number, piece in enumerate(placed.pieces):
                if rank in piece.owners:
                    rows = placed.rows(piece, piece.owners.index(rank))
                    key, held = part_key(placed, piece, rows), self._table(piece_name(placed, number))
                    yield HeldTable(name, key, held, rows.count)

    def _keys_of_all_ranks(self) -> set[str]:
        """What the state dicts of all ranks have together."""
        found = {f"{part}optim.{name}" for part in ("", "replicated.") for name in ("step", "seed")}
        for placed in self.geometry.placement.tables:
            tables = {f"tables.{placed.table.name}"} if placed.replicated else set()
            for piece in placed.pieces:
                shards = range(len(piece.owners))
                tables |= {part_key(placed, piece, placed.rows(piece, shard)) for shard in shards}
            entries = ["weight", ENTRY, *(f"optim.{state.name}" for state in self.states_of(placed.table.name))]
            found |= {f"{table}.{entry}" for table in tables for entry in entries}
        return found

    def _saved(self) -> dict[str, Tensor]:
        """The live rows and states by key."""
        found = {}
        for name, key, table, rows in self.held_tables():
            found[f"{key}.weight"] = table.weight[:rows]
            states = table.states()
            found |= {f"{key}.optim.{state.name}": states[state.name][:rows] for state in self.states_of(name)}
        return found

    def _rules(self) -> dict[str, str]:
        """The names of the rules whose states are held here, by the key of the entry that tells it."""
        held = [each for each in self.held_tables() if self.states_of(each.name)]
        return {f"{each.key}.{ENTRY}": given_rule(each.table.layout) for each in held}

    def check_saved_keys(self) -> None:
        """`SpecError` if two tensors of this rank would have one key."""
        held = ((each.key, self.states_of(each.name)) for each in self.held_tables())
        check_keys(f"{key}.{name}" for key, states in held for name in ("weight", *(f"optim.{s.name}" for s in states)))

    def _saved_counters(self) -> dict[str, Tensor]:
        return {
            prefix + key: counter
            for prefix, part in self._parts_trained().items()
            for key, counter in part._trainer.counters().items()
        }

    def _whose(self) -> dict[str, Any]:
        """What shards depend on, beside the tables' shapes."""
        return {"rank": self._ranks.rank, "ranks": self._ranks.size, "plan": self.plan.digest()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][SHARD] = self._whose()
        destination.update({prefix + key: live.contiguous() for key, live in self._saved().items()})
        destination.update({prefix + key: counter.clone() for key, counter in self._saved_counters().items()})
        destination.update({prefix + key: rule_entry(rule) for key, rule in self._rules().items()})

    @torch.no_grad()
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
        """Takes what this rank saved. If anything of it is wrong, nothing of it is taken."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, [], [], error_msgs)
        told, own = local_metadata.get(SHARD, self._whose()), self._whose()
        if told != own:
            error_msgs.append(
                f"{prefix or 'the module'}: the state dict holds the shards of rank {told['rank']} of {told['ranks']} "
                f"(plan {told['plan']}), this is rank {own['rank']} of {own['ranks']} (plan {own['plan']}); every rank "
                "loads what it saved itself; for another plan or number of ranks save full(table) and use load_full"
            )
            return
        live, counters = self._saved(), self._saved_counters()
        rules = {prefix + key: rule for key, rule in self._rules().items() if prefix + key in state_dict}
        wrong = [text for key, rule in rules.items() if (text := wrong_rule(key, state_dict[key], rule)) is not None]
        missing: list[str] = []
        for key, target in (live | counters).items():
            given = state_dict.get(prefix + key)
            if given is None:
                missing.append(prefix + key)
            elif key in counters and (problem := _wrong_counter(given, target)):
                allowed = "allowed: a tensor of one whole number, at least 0"
                wrong.append(f"{prefix}{key}: {problem} is not allowed; {allowed}")
            elif not isinstance(given, Tensor) or given.shape != target.shape:
                what = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                wrong.append(f"{prefix}{key}: {what} does not fit this rank's shard of shape {tuple(target.shape)}")
        parts = {prefix + key.removesuffix(".weight").partition("[")[0] for key in live if prefix + key in missing}
        others = [key for key in state_dict if key.startswith(tuple(f"{part}[" for part in parts))] if parts else []
        if others:
            own_key = next(key for key in missing if key.startswith(tuple(parts)))
            wrong.append(
                f"{own_key}: the state dict has {others[0]} instead, of another plan or number of ranks; load it with "
                "the ones it was saved with, or save full(table) there and use load_full here"
            )
        known = {prefix + key for key in self._keys_of_all_ranks()}
        unexpected = [key for key in state_dict if strict and key.startswith(prefix) and key not in known]
        error_msgs += wrong
        missing_keys += missing
        unexpected_keys += unexpected
        if wrong or (strict and (missing or unexpected)):
            return
        for key, target in (live | counters).items():
            if prefix + key in state_dict and not target.is_meta:
                target.copy_(state_dict[prefix + key])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts leave the tables alone; a move is refused."""
        device = fn(torch.empty(0, dtype=torch.float32, device=self._device)).device
        if device != self._device:
            raise RuntimeError(
                f"a sharded collection stays on the device it was made on ({self._device}), with its process groups; "
                f"make it with device={str(device)!r}, or move the other modules one by one"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a sharded collection cannot be copied or pickled: its process groups cannot; "
            "make another one with the same arguments on every rank and give it state_dict() (this rank's shards), or "
            "take whole tables with full(table)"
        )


def part_key(placed: TablePlacement, piece: Piece, rows: Rows) -> str:
    """A shard's name in state dicts: the table's, with the rows and columns as one would take them from the whole."""
    shape = placed.table.num_embeddings, placed.table.embedding_dim
    taken, columns = rows.range, f"{piece.begin}:{piece.end}"
    of_rows = f"{taken.start}::{taken.step}" if rows.by == "modulo" else f"{taken.start}:{taken.stop}"
    parts = [":" if rows.count == shape[0] else of_rows, *([] if piece.width == shape[1] else [columns])]
    key = f"tables.{placed.table.name}"
    return key if parts == [":"] else f"{key}[{','.join(parts)}]"


def held_names(placed: TablePlacement, rank: int) -> list[str]:
    """What a rank holds of a table, as its own collection calls it."""
    if placed.replicated:
        return [placed.table.name]
    return [piece_name(placed, number) for number, piece in enumerate(placed.pieces) if rank in piece.owners]
