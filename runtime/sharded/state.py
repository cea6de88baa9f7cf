"""The state dict of a sharded collection. On each rank it has the shards of that rank, without padding rows.

tables.<table>.weight              tables.<table>.optim.<state>           a table that the rank holds as a whole
tables.<table>[1::3,0:4].weight    tables.<table>[1::3,0:4].optim.<state>     a shard, with its rows and columns
tables.<table>.optim.rule.name     for each of these: the rule that the states belong to
optim.step, optim.seed             replicated.optim.step, replicated.optim.seed

A key means the same on all ranks: tensors with the same key are equal, and different shards have different keys.
torch.distributed.checkpoint relies on that, because it takes tensors with the same key for copies.
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
from embforge.sharded.norms import user_rule
from embforge.storage.remap import Remap, loaded_entries
from embforge.storage.rule_entry import ENTRY, check_keys, rule_entry, wrong_rule
from embforge.storage.table import Table
from embforge.training.surface import TrainingSurface
from embforge.training.trainer import wrong_counter

SHARD = "embforge_shard"
"""The key of a state dict's metadata that says which rank's shards the state dict has."""


class HeldTable(NamedTuple):
    """A table that a rank holds: a shard or a replica of a table of the spec."""

    name: str
    """The name of the table in the spec."""
    key: str
    """The prefix of its entries in the state dict."""
    table: Table
    rows: int
    """The number of its rows, without padding rows."""
    piece: int = 0
    """The number of the piece of columns."""
    shard: int = 0
    """The number of the shard of rows."""


class HeldShards(TrainingSurface):
    """A module whose tables are neither parameters nor buffers nor modules, so that no wrapper of torch broadcasts,
    averages or splits them."""

    geometry: Geometry
    plan: ShardPlan
    _remaps: dict[str, Remap]
    """The remaps by table, the same on all ranks. They are not parameters or buffers either, because
    DistributedDataParallel would send them again in every step."""
    _ranks: Ranks
    _device: torch.device

    @abstractmethod
    def _table(self, name: str) -> Table:
        """A table of this rank's own collection, or a replicated one."""

    @abstractmethod
    def states_of(self, table: str) -> tuple[State, ...]:
        """The states of the user's optimizer for a table."""

    def held_tables(self) -> Iterator[HeldTable]:
        """The tables that this rank holds."""
        rank = self._ranks.rank
        for placement in self.geometry.placement.tables:
            name = placement.table.name
            if placement.replicated:
                yield HeldTable(name, f"tables.{name}", self._table(name), placement.table.num_embeddings)
            for number, piece in enumerate(placement.pieces):
                if rank in piece.owners:
                    shard = piece.owners.index(rank)
                    rows = placement.rows(piece, shard)
                    key, held = part_key(placement, piece, rows), self._table(piece_name(placement, number))
                    yield HeldTable(name, key, held, rows.count, number, shard)

    def _keys_of_all_ranks(self) -> set[str]:
        """The keys of the state dicts of all ranks."""
        keys = {f"{prefix}optim.{name}" for prefix in ("", "replicated.") for name in ("step", "seed")}
        for placement in self.geometry.placement.tables:
            tables = {f"tables.{placement.table.name}"} if placement.replicated else set()
            for piece in placement.pieces:
                shards = range(len(piece.owners))
                tables |= {part_key(placement, piece, placement.rows(piece, shard)) for shard in shards}
            entries = ["weight", ENTRY, *(f"optim.{state.name}" for state in self.states_of(placement.table.name))]
            keys |= {f"{table}.{entry}" for table in tables for entry in entries}
        return keys

    def _saved(self) -> dict[str, Tensor]:
        """The live rows and states of this rank, by key."""
        saved = {}
        for held in self.held_tables():
            saved[f"{held.key}.weight"] = held.table.weight[: held.rows]
            states = held.table.states()  # more than the user's if ranks share reductions
            for state in self.states_of(held.name):
                saved[f"{held.key}.optim.{state.name}"] = states[state.name][: held.rows]
        return saved

    def _rules(self) -> dict[str, str]:
        """The names of the rules whose states this rank holds, by the keys of their entries."""
        with_states = [held for held in self.held_tables() if self.states_of(held.name)]
        return {f"{held.key}.{ENTRY}": user_rule(held.table.layout) for held in with_states}

    def check_saved_keys(self) -> None:
        """Raises `SpecError` if two tensors of this rank would have the same key."""
        tables = ((held.key, self.states_of(held.name)) for held in self.held_tables())
        check_keys(
            f"{key}.{name}" for key, states in tables for name in ("weight", *(f"optim.{s.name}" for s in states))
        )

    def _sharding(self) -> dict[str, int | str]:
        """What determines the shards of this rank, in addition to the shapes of the tables."""
        return {"rank": self._ranks.rank, "ranks": self._ranks.size, "plan": self.plan.digest()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][SHARD] = self._sharding()
        destination.update({prefix + key: live.contiguous() for key, live in self._saved().items()})
        destination.update({prefix + key: counter.clone() for key, counter in self.trainer.counters().items()})
        destination.update({prefix + key: rule_entry(rule) for key, rule in self._rules().items()})
        entries = {f"{prefix}tables.{name}.remap.entries": remap.entries for name, remap in self._remaps.items()}
        destination.update(entries)

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
        """Loads what this rank saved. If anything in it is wrong, nothing is loaded."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, [], [], error_msgs)
        saved, own = local_metadata.get(SHARD, self._sharding()), self._sharding()
        if saved != own:
            error_msgs.append(
                f"{prefix or 'the module'}: the state dict holds the shards of rank {saved['rank']} of "
                f"{saved['ranks']} (plan {saved['plan']}), but this is rank {own['rank']} of {own['ranks']} (plan "
                f"{own['plan']}); every rank must load what it saved itself; for another plan or number of ranks, save "
                "full(table) and use load_full"
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
                    loaded_entries(remap.table, state_dict[key])
            except (TypeError, ValueError) as error:
                wrong.append(f"{key}: {error}")
        for key, target in (live | counters).items():
            value = state_dict.get(prefix + key)
            if value is None:
                missing.append(prefix + key)
            elif key in counters and (problem := wrong_counter(prefix + key, value, target)) is not None:
                wrong.append(problem)
            elif not isinstance(value, Tensor) or value.shape != target.shape:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                wrong.append(f"{prefix}{key}: {what} does not fit this rank's shard of shape {tuple(target.shape)}")
        tables = {prefix + key.removesuffix(".weight").partition("[")[0] for key in live if prefix + key in missing}
        others = [key for key in state_dict if key.startswith(tuple(f"{table}[" for table in tables))] if tables else []
        if others:
            own_key = next(key for key in missing if key.startswith(tuple(tables)))
            wrong.append(
                f"{own_key}: the state dict has {others[0]} instead, from another plan or number of ranks; load it "
                "with the plan and the number of ranks with which it was saved, or save full(table) there and use "
                "load_full here"
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
                remap.load(state_dict[key])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies a function to parameters and buffers. Casts do not change the tables; a move to another device
        raises RuntimeError."""
        device = device_after(fn, torch.empty(0, dtype=torch.float32, device=self._device))
        if device != self._device:
            raise RuntimeError(
                f"a sharded collection stays on the device it was made on ({self._device}), because its process groups "
                f"are for that device; make it with device={str(device)!r}, or move the other modules one by one"
            )
        nn.Module._apply(self, fn, recurse)
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: a sharded collection cannot be copied or pickled, because its process groups "
            "cannot; make another one with the same arguments on every rank and load state_dict() (this rank's "
            "shards), or get whole tables with full(table)"
        )


def part_key(placement: TablePlacement, piece: Piece, rows: Rows) -> str:
    """The name of a shard in state dicts: the table's name, with the slices of the rows and columns in the whole
    table."""
    shape = placement.table.num_embeddings, placement.table.embedding_dim
    taken, columns = rows.range, f"{piece.begin}:{piece.end}"
    of_rows = f"{taken.start}::{taken.step}" if rows.by == "modulo" else f"{taken.start}:{taken.stop}"
    parts = [":" if rows.count == shape[0] else of_rows, *([] if piece.width == shape[1] else [columns])]
    key = f"tables.{placement.table.name}"
    return key if parts == [":"] else f"{key}[{','.join(parts)}]"


def held_names(placement: TablePlacement, rank: int) -> list[str]:
    """The names, in a rank's own collections, of the pieces of a table that the rank holds."""
    if placement.replicated:
        return [placement.table.name]
    return [piece_name(placement, number) for number, piece in enumerate(placement.pieces) if rank in piece.owners]
