"""What a rank's state dict holds of a sharded collection: its own shards, without the rows that only pad them.

tables.<table>.weight              tables.<table>.optim.<state>           of a table that the rank holds as a whole
tables.<table>[1::3,0:4].weight    tables.<table>[1::3,0:4].optim.<state>     of a part: its rows and columns
tables.<table>.optim.rule.name     of each of these: whose states they are
optim.step, optim.seed             replicated.optim.step, replicated.optim.seed

A key says what its tensor is, whatever the rank: equal keys of two ranks hold equal tensors, and different shards have
different keys. torch.distributed.checkpoint, which takes tensors with one key for copies, relies on that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from embforge.chosen_device import device_after
from embforge.codegen.rules.rule import State
from embforge.codegen.sharding.geometry import Geometry, piece_name
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.sharding.placement import Piece, Rows, TablePlacement
from embforge.sharded.exchange.collectives import Ranks
from embforge.sharded.norms import given_rule
from embforge.storage.remap import Remap, checked_entries
from embforge.storage.rule_entry import ENTRY, check_keys, rule_entry, wrong_rule
from embforge.storage.table import Table
from embforge.training.surface import TrainingSurface
from embforge.training.trainer import wrong_counter

SHARD = "embforge_shard"
"""Key of a state dict's metadata: whose shards it holds."""


class HeldTable(NamedTuple):
    """A table of a rank's own: a shard, or a replica."""

    name: str
    """The whole table's."""
    key: str
    """What its entries in the state dict begin with."""
    table: Table
    rows: int
    """How many of its rows are rows of the table."""
    piece: int = 0
    shard: int = 0
    """Which piece of the table's columns, and which shard of their rows it is."""


class HeldShards(TrainingSurface):
    """A module whose tables are neither parameters nor buffers nor modules: nobody may broadcast, average or split
    them."""

    geometry: Geometry
    plan: ShardPlan
    _remaps: dict[str, Remap]
    """The remaps by table, the same on all ranks: as little parameters or buffers as the tables themselves, because
    DistributedDataParallel would send them anew in every step."""
    _ranks: Ranks
    _device: torch.device

    @abstractmethod
    def _table(self, name: str) -> Table:
        """A table of this rank's own collection, or a replicated one."""

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
                    shard = piece.owners.index(rank)
                    rows = placed.rows(piece, shard)
                    key, held = part_key(placed, piece, rows), self._table(piece_name(placed, number))
                    yield HeldTable(name, key, held, rows.count, number, shard)

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
        for held in self.held_tables():
            found[f"{held.key}.weight"] = held.table.weight[: held.rows]
            states = held.table.states()  # more than the user's where ranks share reductions
            for state in self.states_of(held.name):
                found[f"{held.key}.optim.{state.name}"] = states[state.name][: held.rows]
        return found

    def _rules(self) -> dict[str, str]:
        """The names of the rules whose states are held here, by the key of the entry that tells it."""
        held = [each for each in self.held_tables() if self.states_of(each.name)]
        return {f"{each.key}.{ENTRY}": given_rule(each.table.layout) for each in held}

    def check_saved_keys(self) -> None:
        """`SpecError` if two tensors of this rank would have one key."""
        held = ((each.key, self.states_of(each.name)) for each in self.held_tables())
        check_keys(f"{key}.{name}" for key, states in held for name in ("weight", *(f"optim.{s.name}" for s in states)))

    def _whose(self) -> dict[str, int | str]:
        """What shards depend on, beside the tables' shapes."""
        return {"rank": self._ranks.rank, "ranks": self._ranks.size, "plan": self.plan.digest()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][SHARD] = self._whose()
        destination.update({prefix + key: live.contiguous() for key, live in self._saved().items()})
        destination.update({prefix + key: counter.clone() for key, counter in self.trainer.counters().items()})
        destination.update({prefix + key: rule_entry(rule) for key, rule in self._rules().items()})
        known = {name: remap.entries for name, remap in self._remaps.items() if remap.is_known}
        destination.update({f"{prefix}tables.{name}.remap.entries": entries for name, entries in known.items()})

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
        live, counters = self._saved(), self.trainer.counters()
        remaps = {f"{prefix}tables.{name}.remap.entries": remap for name, remap in self._remaps.items()}
        rules = {prefix + key: rule for key, rule in self._rules().items() if prefix + key in state_dict}
        wrong = [text for key, rule in rules.items() if (text := wrong_rule(key, state_dict[key], rule)) is not None]
        missing: list[str] = [key for key in remaps if key not in state_dict]
        for key, remap in remaps.items():
            try:
                if key in state_dict:
                    checked_entries(remap.table, state_dict[key])
            except (TypeError, ValueError) as error:
                wrong.append(f"{key}: {error}")
        for key, target in (live | counters).items():
            given = state_dict.get(prefix + key)
            if given is None:
                missing.append(prefix + key)
            elif key in counters and (problem := wrong_counter(prefix + key, given, target)) is not None:
                wrong.append(problem)
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
        known = {prefix + key for key in self._keys_of_all_ranks()} | remaps.keys()
        unexpected = [key for key in state_dict if strict and key.startswith(prefix) and key not in known]
        error_msgs += wrong
        missing_keys += missing
        unexpected_keys += unexpected
        if wrong or (strict and (missing or unexpected)):
            return
        for key, target in (live | counters).items():
            if prefix + key in state_dict and not target.is_meta:
                target.copy_(state_dict[prefix + key])
        for key, remap in remaps.items():
            if key in state_dict and not remap.entries.is_meta:
                remap.set(state_dict[key])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casts leave the tables alone; a move is refused."""
        device = device_after(fn, torch.empty(0, dtype=torch.float32, device=self._device))
        if device != self._device:
            raise RuntimeError(
                f"a sharded collection stays on the device it was made on ({self._device}), with its process groups; "
                f"make it with device={str(device)!r}, or move the other modules one by one"
            )
        nn.Module._apply(self, fn, recurse)
        return self

    def __getstate__(self) -> NoReturn:
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
