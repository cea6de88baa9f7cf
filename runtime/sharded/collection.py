"""`ShardedEmbeddingCollection`: the tables of a spec spread over ranks, called like an unsharded collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import current_thread
from typing import Any

import torch
from torch import Tensor

from embforge.autograd_calls import all_applied
from embforge.backends import BackendName, arch_of, backend_on
from embforge.chosen_device import chosen_device
from embforge.codegen.errors import PlanError, RankError
from embforge.codegen.planner.memory import check_memory
from embforge.codegen.planner.topology import Topology
from embforge.codegen.plans import resolve_plan
from embforge.codegen.poolings import selections_of
from embforge.codegen.rules.rule import Extent
from embforge.codegen.sharding.geometry import Geometry, piece_name
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.stages import FLAGS, StagePlan
from embforge.id_resolution import ResolveStep, resolve_step
from embforge.inputs import Batch, BoundsCheck, normalise, usual_bounds_check, with_negation_applied
from embforge.launch.kernels import Program
from embforge.sharded.agreement import agree, common_node_size, wrong_argument
from embforge.sharded.exchange.collectives import Exchange, Ranks
from embforge.sharded.exchange.formats import Formats, computed_in
from embforge.sharded.exchange.wire import Wire
from embforge.sharded.join import EmptyCalls
from embforge.sharded.lookup import ShardedLookup, run_forward
from embforge.sharded.norms import RowNorms, needs_norms, shared_rules
from embforge.sharded.replicas import Replicas
from embforge.sharded.stages.all2all import Vectors
from embforge.sharded.stages.data_distributor import Distributed, Distributor
from embforge.sharded.stages.model_forward import Owner, OwnOptions
from embforge.sharded.stages.network import Network
from embforge.sharded.stages.prefetch import IdsOnTheirWay
from embforge.sharded.stages.stage_metadata import Base, Wiring
from embforge.sharded.starting_rows import draw_rows
from embforge.storage.remap import Remap, RemappedModule, digests_of, new_remaps, set_remaps
from embforge.storage.table import Table
from embforge.training.numbers import drawn_seed
from embforge.training.rule_groups import Optimizers, RuleGroups, rule_groups


class ShardedEmbeddingCollection(RemappedModule, EmptyCalls):
    """All lookups of a spec over ranks: a lookup kernel a rank, an exchange of ids and one of vectors for all tables.

    Every rank calls it with its own samples (as many as it has, also none) and gets their results; every rank must call
    it, and its backward, equally often. `plan`: a `ShardPlan`. `process_group`: a ProcessGroup, a DeviceMesh (two
    dimensions: nodes, ranks a node) or None: all ranks; the module makes groups of its own with these ranks.
    `optimizer`: one of `ef.optim`, or a mapping from tables to such; gradients of all ranks are added
    (`average_gradients`: divided by the number of ranks, as DistributedDataParallel does). `duplicates`: "keep" sends
    every id of a feature that is not pooled and every gradient back, so that results and training equal the unsharded
    collection's bit by bit; "merge" sends equal ids once and adds up their gradients before they travel. `pools`:
    "different" asks the holders for no empty pool and for equal ones once, "all" gets one of every bag; results are the
    same bits; None: "different" on CPUs, "all" on GPUs, where finding equal ones takes a sort. `formats`: number
    formats on the wire. `node_size`: ranks a node, if torchrun does not say. `timeout`: of the module's groups; None:
    as the given group's. `topology`: whose memory a rank has; a table that does not fit is named before anything is
    allocated. What has the name of an argument or method of `EmbeddingCollection` means the same.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        plan: ShardPlan,
        process_group: object = None,
        optimizer: Optimizers = None,
        *,
        device: str | torch.device | None = None,
        backend: BackendName | None = None,
        bounds_check: BoundsCheck = "error",
        accumulate: bool = False,
        average_gradients: bool = False,
        duplicates: str = "keep",
        pools: str | None = None,
        formats: Formats | None = None,
        kernels: str | Path | None = None,
        batch_size: int | None = None,
        node_size: int | None = None,
        timeout: timedelta | None = None,
        topology: Topology | None = None,
        remap: Mapping[str, Any] | None = None,
        _bases: list[Base] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.plan = spec, plan
        device = chosen_device(device)
        if str(device) == "cuda":  # without a number
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._bounds_check = bounds_check
        self.formats = formats or Formats()
        self._ranks = Ranks(process_group, node_size, timeout)
        self._ranks.check_device(device)
        self._ids = Exchange(self._ranks)
        self._wires = Exchange(self._ranks)
        self._ranks.node_size = common_node_size(self._ids)
        self._calls = 0
        told = {
            "accumulate": accumulate, "average_gradients": average_gradients, "duplicates": duplicates, "pools": pools,
            "formats": asdict(self.formats) if isinstance(self.formats, Formats) else None,
            "bounds_check": bounds_check, "node_size": self._ranks.node_size, "device": device.type,
            "bases": [asdict(base) for base in _bases or ()],
        }  # fmt: skip
        refused = wrong_argument(spec, plan, optimizer, bounds_check, duplicates, pools, self.formats)
        if refused is None:
            try:
                self._remaps = new_remaps(spec, device)
                set_remaps(spec, self._remaps, remap)
                told["remap"] = digests_of(self._remaps)
            except Exception as error:  # whatever it is, the other ranks must not wait for this one
                refused = error
        seed = self._agree(optimizer, refused, told)
        try:
            groups = rule_groups(optimizer, spec)
            assert groups is not None
            self._make(
                groups, _bases, seed, accumulate=accumulate, average_gradients=average_gradients,
                duplicates=duplicates, pools=pools, backend=backend, kernels=kernels, batch_size=batch_size,
                topology=topology,
            )  # fmt: skip
        except Exception as error:  # no memory, no such backend: the others must not wait for this rank's first call
            refused = error
        agree(self._ids, {}, refused, seed)

    def _make(
        self,
        groups: RuleGroups,
        bases: list[Base] | None,
        seed: int,
        *,
        backend: BackendName | None,
        accumulate: bool,
        average_gradients: bool,
        duplicates: str,
        pools: str | None,
        kernels: str | Path | None,
        batch_size: int | None,
        topology: Topology | None,
    ) -> None:
        """All that ranks have of their own, once they agree."""
        spec, plan, device = self.spec, self.plan, self._device
        bounds_check = usual_bounds_check(spec, self._bounds_check)
        placement = place(plan, spec, self._ranks.size, self._ranks.node_size)
        if topology is not None:
            check_memory(placement, groups.updates(), topology, batch_size or 0)
        self.geometry = Geometry(placement, tuple(base.first for base in bases or ()))
        forward, backward = self._wire_formats()
        norms = needs_norms(self.geometry, groups)
        backend = backend_on(device, backend)
        kernel_directory = str(kernels) if kernels is not None else None
        options: OwnOptions = {
            "device": device, "backend": backend, "kernels": kernel_directory, "batch_size": batch_size,
            "bounds_check": bounds_check,
        }  # fmt: skip
        local = self.geometry.locals[self._ranks.rank]
        self.owner = None
        if local is not None:
            has_hierarchical = local.hierarchical_width > 0
            own = shared_rules(groups, norms).for_parts([table.name for table in local.spec.tables], local.wholes)
            self.owner = Owner(
                local, "fp32" if has_hierarchical else computed_in(forward), computed_in(backward),
                own, accumulate or bool(norms), options,
            )  # fmt: skip
        arch = arch_of(backend, device)
        stage_plan = StagePlan(
            backend,
            arch,
            "int64",
            self.geometry.id_dtype,
            computed_in(forward),
            computed_in(backward),
            spec.output_dtype,
            tuple(combiner.name for combiner in selections_of(feature.kind for feature in spec.features)),
        )
        asks = self._ranks.size > 1 and (pools or ("different" if device.type == "cpu" else "all")) == "different"
        wiring = Wiring(self.geometry, self._ranks.rank, device, bases, asks=asks)
        self.distributor = Distributor(
            wiring, self._ids, stage_plan, spec, bounds_check, duplicates == "merge", kernel_directory
        )
        self.vectors = Vectors(
            wiring, self._wires, Wire(forward, stage_plan, kernel_directory),
            Wire(backward, stage_plan, kernel_directory), stage_plan, kernel_directory,
        )  # fmt: skip
        self.network = Network(wiring, stage_plan, computed_in(forward), backend, arch, kernel_directory)
        self.replicas = None
        if self.geometry.replicated is not None:
            names = [table.name for table in self.geometry.replicated.tables]
            self.replicas = Replicas(self.geometry, self._wires, groups.for_parts(names, names), options)
        self.trainer = self._shared_trainer(groups, accumulate)
        self._frozen = frozenset(name for place, name in enumerate(groups.tables) if groups.of_table(place) is None)
        self._row_norms = None
        if norms:
            self._row_norms = RowNorms(self.geometry, self._ranks.rank, self._wires, self.owner, norms, device)
        self.gradient_factor = None
        if average_gradients and self._ranks.size > 1:
            self.gradient_factor = torch.full((1,), 1 / self._ranks.size, dtype=torch.float32, device=device)
        self.check_saved_keys()
        draw_rows(spec, self.held_tables(), seed)
        self.trainer.seed(seed % 2**63)
        self._resolve = _resolve_step(spec, backend, arch, kernel_directory, self.remaps())

    def remaps(self) -> dict[str, Remap]:
        """The remaps of those tables whose ids are not rows, by table: the same on all ranks."""
        return dict(self._remaps)

    _resolve: ResolveStep | None = None
    """What runs before every exchange of ids; None where ids are rows."""

    # ---- Calls --------------------------------------------------------------------------------------------

    def distribute(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Distributed:
        """The first half of a call: ids go to their owners. Give the result to the module instead of a batch.

        Raises on every rank what is wrong with the batch of any.
        """
        if isinstance(values, Distributed):
            if values.distributor is not self.distributor:
                raise ValueError(
                    "values: this batch was distributed by another module, or before this one moved, so that its ids "
                    "are not where these tables are; call distribute() of the module that looks it up"
                )
            return values
        self.wait_for_ids()
        self._calls += 1
        try:
            checked = with_negation_applied(normalise(self.spec, self._device, values, offsets, weights, lengths))
            if self._resolve is not None:
                checked = self._resolve(checked)
            self._load_kernels(checked.values.dtype, bool(self._flags(checked) & (FLAGS["trains"] | FLAGS["joined"])))
            batch: Batch | Exception = checked
        except Exception as error:  # whatever it is, the other ranks must hear of it
            batch = error
        done = self.distributor(batch, self._flags(batch), self._calls)
        if done.wants("trains") and done.wants("no_gradients"):
            mine = "on" if torch.is_grad_enabled() else "off"
            raise RankError(
                f"rank {self._ranks.rank} calls with gradients {mine}, another rank does not, so that one of them "
                "would wait for a backward that never comes; call under torch.no_grad() on all ranks or on none"
            )
        return done

    def _load_kernels(self, ids: torch.dtype, trains: bool) -> None:
        """Those of the lookup and its backward, before the first exchange: a rank that cannot build them tells the
        others, who would wait for its vectors."""
        if (ids, trains) in self._loaded:
            return
        if self.owner is not None:
            self.owner.load(getattr(torch, self.geometry.id_dtype), trains)
        self.vectors.load()
        self.network.load(trains)
        if self.replicas is not None:
            self.replicas.load(ids, trains)
        self._loaded |= {(ids, trains)}

    _loaded: frozenset[tuple[torch.dtype, bool]] = frozenset()

    def wait_for_ids(self) -> None:
        """Lets an exchange of ids end that began earlier in another thread: ranks must begin them in the same order."""
        pending = self.ids_on_their_way
        if pending is not None and current_thread() is not pending.thread:
            wait([pending.arrival])

    ids_on_their_way: IdsOnTheirWay | None = None
    """Set by `PrefetchedBatches`."""

    def _flags(self, batch: Batch | Exception) -> int:
        """What this rank wants of a call."""
        if self._joined:  # whatever the others want
            return FLAGS["joined"]
        if not torch.is_grad_enabled():
            return FLAGS["no_gradients"]
        given = None if isinstance(batch, Exception) else batch.weights
        if given is not None and given.requires_grad:
            return FLAGS["weight_gradient"] | FLAGS["trains"]
        return FLAGS["trains"] if self.training_rows() else 0

    def forward(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """`[B, total dim]`, features side by side in the spec's order, of this rank's samples."""
        if self.sequence_features:
            names = ", ".join(repr(self.spec.features[f].name) for f in self.sequence_features)
            raise ValueError(
                f"feature {names} has pooling 'none' and no column in a [B, D] result; call forward_dict()"
            )
        return self._call(values, offsets, weights, lengths)[0]

    def forward_dict(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """A tensor a feature: `[B, width]`, or `[ids of the feature, dim]` for pooling 'none'."""
        pooled, *sequences = self._call(values, offsets, weights, lengths)
        rows = iter(sequences)
        return {
            placed.feature.name: next(rows)
            if placed.column is None
            else pooled[:, placed.column : placed.column + placed.width]
            for placed in self.geometry.layout.features
        }

    def _call(self, *given: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # sizes of exchanges depend on ids: no part of a graph
            found: tuple[Tensor, ...] = torch.compiler.disable(self._call_eagerly)(*given)
            return found
        return self._call_eagerly(*given)

    def _call_eagerly(self, values: Any, offsets: Any, weights: Any, lengths: Any) -> tuple[Tensor, ...]:
        self.notify_join()
        return self.lookup(self.distribute(values, offsets, weights, lengths=lengths))

    def lookup(self, done: Distributed) -> tuple[Tensor, ...]:
        """The second half of a call: pooled columns, then the rows of every feature that is not pooled."""
        self.trainer.note_forward()
        if not done.wants("trains"):
            return run_forward(self, done, keep=False)[0]
        return all_applied(ShardedLookup, self, done, done.given.weights, self.trainer.numbers.anchor)

    # ---- Rows ---------------------------------------------------------------------------------------------

    def weight(self, table: str) -> Tensor:
        """The live rows of a table that this rank holds: `[rows, columns]` of its shard (the whole, if it is
        replicated).

        Of a table of which it holds several pieces of columns or none: see `shards`.
        """
        shards = self.shards(table)
        if len(shards) != 1:
            raise ValueError(
                f"table {table!r}: this rank holds {len(shards)} shards of it; take them from shards(), or full()"
            )
        return next(iter(shards.values()))

    def shards(self, table: str) -> dict[tuple[range, range], Tensor]:
        """The live parts of a table that this rank holds, by rows and columns."""
        self.spec.table(table)
        placed = self.geometry.placement.by_name[table]
        if placed.replicated:
            whole = placed.table
            return {(range(whole.num_embeddings), range(whole.embedding_dim)): self._table(table).weight}
        found = {}
        for number, piece in enumerate(placed.pieces):
            if self._ranks.rank in piece.owners:
                rows = placed.rows(piece, piece.owners.index(self._ranks.rank))
                shard = self._table(piece_name(placed, number)).weight[: rows.count]
                found[rows.range, range(piece.begin, piece.end)] = shard
        return found

    @torch.no_grad()
    def load_full(self, tables: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of whole tables `[rows, dim]`. Every rank must be given the same."""
        for name, given in tables.items():
            table = self.spec.table(name)
            shape = (table.num_embeddings, table.embedding_dim)
            if tuple(given.shape) != shape:
                raise ValueError(f"table {name!r}: shape {tuple(given.shape)} does not fit; allowed: {shape}")
            for (rows, columns), shard in self.shards(name).items():
                shard.copy_(given[rows.start : rows.stop : rows.step, columns.start : columns.stop])

    @torch.no_grad()
    def full(self, table: str) -> Tensor:
        """The whole table `[rows, dim]`, on every rank. All ranks must call."""
        return self._gather(table, lambda shard: shard.weight, None)

    @torch.no_grad()
    def full_optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The whole states of a table by name: `[rows, dim]` of elements, `[rows]` of rows. All ranks must call."""
        self.spec.table(table)
        return {
            state.name: self._gather(table, partial(_state_of, state.name), state.extent)
            for state in self.states_of(table)
        }

    def _gather(self, name: str, take: Callable[[Table], Tensor], extent: Extent | None) -> Tensor:
        spec, placed = self.spec.table(name), self.geometry.placement.by_name[name]
        if placed.replicated:
            return take(self._table(name)).clone()
        of_rows = extent == "row"
        dtype = torch.float32 if extent else getattr(torch, _torch_name(spec.dtype))
        shape = (spec.num_embeddings,) if of_rows else (spec.num_embeddings, spec.embedding_dim)
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for number, piece in enumerate(placed.pieces):
            for shard, owner in enumerate(piece.owners):
                rows = placed.rows(piece, shard)
                part = whole.new_empty((rows.count, *(() if of_rows else (piece.width,))))
                if owner == self._ranks.rank:
                    part.copy_(take(self._table(piece_name(placed, number)))[: rows.count])
                if rows.count:
                    self._wires.broadcast(part, owner)
                place = slice(rows.range.start, rows.range.stop, rows.range.step)
                if of_rows:
                    whole[place] = part
                else:
                    whole[place, piece.begin : piece.end] = part
        return whole

    def _table(self, name: str) -> Table:
        for module in self._own_collections():
            if name in module.named_tables():
                return module.named_tables()[name]
        raise PlanError(f"table {name!r}: this rank holds nothing of it")

    # ---- About itself -------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Bytes that this rank has sent to others since it was made (or `reset_counters`), by what they were."""
        return {**self._ids.counters, **self._wires.counters}

    def reset_counters(self) -> None:
        """Counts from 0 again."""
        self._ids.counters.clear()
        self._wires.counters.clear()

    def check(self) -> None:
        """Waits for the device and raises the error of an earlier call, if there is one."""
        for module in self._own_collections():
            module.check()

    def close(self) -> None:
        """Gives the module's process groups back. All ranks must call; the module cannot be called any more."""
        self._ids.close()
        self._wires.close()

    def extra_repr(self) -> str:
        kinds = sorted({kind.name for _, kind in self.plan.kinds})
        return f"rank {self._ranks.rank} of {self._ranks.size}, {', '.join(kinds)}, {len(self.spec.tables)} tables"

    # ---- Agreement ----------------------------------------------------------------------------------------

    def _wire_formats(self) -> tuple[str, str]:
        whole = self.geometry.whole_bags
        forward = self.formats.forward or (self.spec.output_dtype if whole else "fp32")
        return forward, self.formats.backward or "fp32"

    def _agree(self, optimizer: Optimizers, wrong: Exception | None, options: dict[str, Any]) -> int:
        """Raises where ranks differ in what must be the same; returns the seed of rank 0."""
        facts: dict[str, Any] = {}
        if wrong is None:
            groups = rule_groups(optimizer, self.spec)
            assert groups is not None
            rules = _facts_of(groups)
            facts = {"spec": self.spec.to_dict(), "plan": self.plan.to_dict(), "optimizer": rules, **options}
        return agree(self._ids, facts, wrong, drawn_seed())


def _resolve_step(
    spec: CollectionSpec, backend: str, arch: str, kernels: str | None, remaps: dict[str, Remap]
) -> ResolveStep | None:
    """Rows are int64 here, so that any rank can read from an unknown id's number, which another rank sent, which id it
    was."""
    plan = resolve_plan(spec, backend, arch, "int64")
    programs = {torch.int64: Program(plan, kernels).text}
    return resolve_step(spec, backend, programs, remaps, {}, widens=True)


def _state_of(name: str, shard: Table) -> Tensor:
    return shard.states()[name]


def _facts_of(groups: RuleGroups) -> dict[str, Any]:
    """What ranks must say alike of the optimizers, by the names of their groups if these have some."""
    found = {}
    for number, group in enumerate(groups.groups):
        given = group.optimizer
        facts = {"update": given.update.to_dict(), "lr": float(given.lr), "hyper": given.hyper_values}
        found[group.name] = facts | ({"tables": groups.table_names(group), "group": number} if group.name else {})
    return found.get("", found)


def _torch_name(dtype: str) -> str:
    from embforge.codegen.dtypes import DTYPES

    return DTYPES[dtype].torch_name
