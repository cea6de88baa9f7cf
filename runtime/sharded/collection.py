"""`ShardedEmbeddingCollection`: the tables of a spec, split over ranks, called like an unsharded collection."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from threading import current_thread
from typing import Any

import torch
from torch import Tensor

from embforge.autograd_calls import all_applied
from embforge.backends import BackendName, arch_of, backend_on
from embforge.chosen_device import chosen_device
from embforge.codegen.errors import RankError
from embforge.codegen.planner.memory import check_memory
from embforge.codegen.planner.topology import Topology
from embforge.codegen.plans import resolve_plan
from embforge.codegen.poolings import selections_of
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.stages import FLAGS, StagePlan
from embforge.id_resolution import ResolveStep, resolve_step
from embforge.inputs import Batch, BoundsCheck, normalise, usual_bounds_check, with_negation_applied
from embforge.launch.kernels import Program
from embforge.number_formats import torch_dtype
from embforge.sharded.agreement import agree, common_node_size, optimizer_facts, wrong_argument
from embforge.sharded.exchange.collectives import Exchange, Ranks
from embforge.sharded.exchange.formats import Formats, computed_in
from embforge.sharded.exchange.wire import Wire
from embforge.sharded.join import EmptyCalls
from embforge.sharded.lookup import ShardedLookup, run_forward
from embforge.sharded.norms import RowNorms, rules_with_split_reductions, shared_rules
from embforge.sharded.remap_agreement import RemapDigests
from embforge.sharded.replicas import Replicas
from embforge.sharded.stages.all2all import Vectors
from embforge.sharded.stages.data_distributor import Distributed, Distributor
from embforge.sharded.stages.model_forward import CollectionOptions, Owner
from embforge.sharded.stages.network import Network
from embforge.sharded.stages.prefetch import IdsOnTheirWay
from embforge.sharded.stages.stage_metadata import Base, StageArrays
from embforge.sharded.starting_rows import draw_rows
from embforge.storage.remap import Remap, RemappedModule, digests_of, new_remaps, set_remaps
from embforge.training.numbers import drawn_seed
from embforge.training.rule_groups import Optimizers, RuleGroups, rule_groups


class ShardedEmbeddingCollection(RemappedModule, EmptyCalls):
    """All lookups of a spec, over ranks: each rank runs one lookup kernel, and ids and vectors are each exchanged once
    for all tables.

    Every rank calls the module with its own samples, of which it may have any number, also none, and gets their
    results. Every rank must call the module, and its backward, the same number of times. Arguments and methods that
    `EmbeddingCollection` has too mean the same here. The other arguments are:

    - `plan`: a `ShardPlan`.
    - `process_group`: a ProcessGroup, a DeviceMesh (of two dimensions: nodes, and the ranks of a node), or None for all
      ranks. The module makes its own groups of these ranks.
    - `optimizer`: an optimizer of `ef.optim`, or a mapping from tables to optimizers.
    - `average_gradients`: whether the sum of the gradients of all ranks is divided by the number of ranks, as
      DistributedDataParallel does.
    - `duplicates`: "keep" sends every id of a feature that is not pooled, and every gradient, so that results and
      training have the same bits as an unsharded collection. "merge" sends equal ids once, and adds up their gradients
      before they are sent.
    - `pools`: "different" sends no empty pools, and equal pools only once; "all" sends the pool of every bag. Results
      have the same bits. None means "different" on CPUs, and "all" on GPUs, where a sort is needed to find equal pools.
    - `formats`: number formats on the wire.
    - `node_size`: the number of ranks per node, if torchrun does not say it.
    - `timeout`: the timeout of the module's groups; None for that of `process_group`.
    - `topology`: says how much memory a rank has. A table that does not fit is an error before anything is allocated.
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
        facts = {
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
                facts["remap"] = digests_of(self._remaps)
            except Exception as error:  # of any kind: the other ranks must not wait for this one
                refused = error
        seed = self._agree(optimizer, refused, facts)
        try:
            groups = rule_groups(optimizer, spec)
            assert groups is not None
            self._make(
                groups, _bases, seed, accumulate=accumulate, average_gradients=average_gradients,
                duplicates=duplicates, pools=pools, backend=backend, kernels=kernels, batch_size=batch_size,
                topology=topology,
            )  # fmt: skip
        except Exception as error:  # e.g. no memory: the other ranks must not wait for the first call of this one
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
        """Makes everything that each rank has of its own, after the ranks have agreed on the arguments."""
        spec, plan, device = self.spec, self.plan, self._device
        bounds_check = usual_bounds_check(spec, self._bounds_check)
        placement = place(plan, spec, self._ranks.size, self._ranks.node_size)
        if topology is not None:
            check_memory(placement, groups.updates(), topology, batch_size or 0)
        self.geometry = Geometry(placement, tuple(base.first for base in bases or ()))
        forward, backward = self._wire_formats()
        norms = rules_with_split_reductions(self.geometry, groups)
        backend = backend_on(device, backend)
        kernel_directory = str(kernels) if kernels is not None else None
        options: CollectionOptions = {
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
        pools = pools or ("different" if device.type == "cpu" else "all")
        requests_pools = self._ranks.size > 1 and pools == "different"
        arrays = StageArrays(self.geometry, self._ranks.rank, device, bases, requests_pools=requests_pools)
        self.distributor = Distributor(
            arrays, self._ids, stage_plan, spec, bounds_check, duplicates == "merge", RemapDigests(self._remaps),
            kernel_directory,
        )  # fmt: skip
        self.vectors = Vectors(
            arrays, self._wires, Wire(forward, stage_plan, kernel_directory),
            Wire(backward, stage_plan, kernel_directory), stage_plan, kernel_directory,
        )  # fmt: skip
        self.network = Network(arrays, stage_plan, computed_in(forward), backend, arch, kernel_directory)
        self.replicas = None
        if self.geometry.replicated is not None:
            names = [table.name for table in self.geometry.replicated.tables]
            self.replicas = Replicas(self.geometry, self._wires, groups.for_parts(names, names), options)
        self.trainer = self._shared_trainer(groups, accumulate)
        self._frozen = frozenset(name for index, name in enumerate(groups.tables) if groups.of_table(index) is None)
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
        """The remaps of the tables whose ids are not rows, by table. They are the same on all ranks."""
        return dict(self._remaps)

    _resolve: ResolveStep | None = None
    """The step that turns ids into rows before every exchange; None if all ids are rows."""

    # ---- Calls --------------------------------------------------------------------------------------------

    def distribute(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Distributed:
        """The first half of a call: sends ids to the owners of their rows. Pass the result to the module instead of a
        batch.

        Raises an error on every rank if the batch of any rank has a mistake.
        """
        if isinstance(values, Distributed):
            if values.distributor is not self.distributor:
                raise ValueError(
                    "values: this batch was distributed by another module, so its ids are not on the ranks that hold "
                    "their rows here; call distribute() of the module that looks it up"
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
        except Exception as error:  # of any kind: the other ranks must be notified
            batch = error
        distributed = self.distributor(batch, self._flags(batch), self._calls)
        if distributed.wants("trains") and distributed.wants("no_gradients"):
            own, other = ("on", "off") if torch.is_grad_enabled() else ("off", "on")
            raise RankError(
                f"rank {self._ranks.rank} calls with gradients {own}, another rank with gradients {other}, so one of "
                "them would wait for a backward that never runs; call under torch.no_grad() on all ranks or on none"
            )
        return distributed

    def _load_kernels(self, ids: torch.dtype, trains: bool) -> None:
        """Builds and loads the kernels of a call before its first exchange, so that a rank that cannot build them
        notifies the other ranks, which would otherwise wait for its vectors."""
        if (ids, trains) in self._loaded:
            return
        if self.owner is not None:
            self.owner.load(torch_dtype(self.geometry.id_dtype), trains)
        self.vectors.load()
        self.network.load(trains)
        if self.replicas is not None:
            self.replicas.load(ids, trains)
        self._loaded |= {(ids, trains)}

    _loaded: frozenset[tuple[torch.dtype, bool]] = frozenset()

    def wait_for_ids(self) -> None:
        """Waits for an exchange of ids that began earlier in another thread, because all ranks must begin exchanges in
        the same order."""
        pending = self.ids_on_their_way
        if pending is not None and current_thread() is not pending.thread:
            wait([pending.arrival])

    ids_on_their_way: IdsOnTheirWay | None = None
    """The exchange of ids that `PrefetchedBatches` began last."""

    def _flags(self, batch: Batch | Exception) -> int:
        """The flags of a call on this rank."""
        if self._joined:  # the other ranks decide
            return FLAGS["joined"]
        if not torch.is_grad_enabled():
            return FLAGS["no_gradients"]
        weights = None if isinstance(batch, Exception) else batch.weights
        if weights is not None and weights.requires_grad:
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
        """The results of this rank's samples, `[B, total dim]`: the features next to each other, in the order of the
        spec."""
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
        """The results of this rank's samples, one tensor per feature: `[B, width]`, or `[ids of the feature, dim]` for
        pooling 'none'."""
        pooled, *sequences = self._call(values, offsets, weights, lengths)
        rows = iter(sequences)
        return {
            layout.feature.name: next(rows)
            if layout.column is None
            else pooled[:, layout.column : layout.column + layout.width]
            for layout in self.geometry.layout.features
        }

    def _call(self, *arguments: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # the sizes of exchanges depend on ids, so a graph cannot contain them
            results: tuple[Tensor, ...] = torch.compiler.disable(self._call_eagerly)(*arguments)
            return results
        return self._call_eagerly(*arguments)

    def _call_eagerly(self, values: Any, offsets: Any, weights: Any, lengths: Any) -> tuple[Tensor, ...]:
        self.notify_join()
        return self.lookup(self.distribute(values, offsets, weights, lengths=lengths))

    def lookup(self, distributed: Distributed) -> tuple[Tensor, ...]:
        """The second half of a call. Returns the pooled columns, then the rows of each feature that is not pooled."""
        self.trainer.note_forward()
        if not distributed.wants("trains"):
            return run_forward(self, distributed, keep=False)[0]
        return all_applied(ShardedLookup, self, distributed, distributed.input.weights, self.trainer.numbers.anchor)

    # ---- Counters and errors ------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """The bytes that this rank has sent to others since the module was made or `reset_counters` was called, by
        kind."""
        return {**self._ids.counters, **self._wires.counters}

    def reset_counters(self) -> None:
        """Sets all counters to 0."""
        self._ids.counters.clear()
        self._wires.counters.clear()

    def check(self) -> None:
        """Waits for the device and raises the error of an earlier call, if there is one."""
        for module in self._own_collections():
            module.check()

    def close(self) -> None:
        """Destroys the module's process groups. All ranks must call; the module cannot be called after that."""
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
        """Raises RankError if arguments differ between ranks. Returns the seed of rank 0."""
        facts: dict[str, Any] = {}
        if wrong is None:
            groups = rule_groups(optimizer, self.spec)
            assert groups is not None
            rules = optimizer_facts(groups)
            facts = {"spec": self.spec.to_dict(), "plan": self.plan.to_dict(), "optimizer": rules, **options}
        return agree(self._ids, facts, wrong, drawn_seed())


def _resolve_step(
    spec: CollectionSpec, backend: str, arch: str, kernels: str | None, remaps: dict[str, Remap]
) -> ResolveStep | None:
    """The step that turns ids into rows. Rows are int64 here, so that every rank can tell from the number of an unknown
    id, which another rank sent, which id it was."""
    plan = resolve_plan(spec, backend, arch, "int64")
    programs = {torch.int64: Program(plan, kernels).text}
    return resolve_step(spec, backend, programs, remaps, {}, widens=True)
