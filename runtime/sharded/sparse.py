"""`DistributedSparseEmbedding`: pooled lookups in tables that are stacked by width, like SparseOperationKit's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import SpecError
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.sharded.collection import ShardedEmbeddingCollection
from embforge.sharded.stages.all2all import GradientBuffers, ReceivedVectors, Vectors
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.stage_metadata import Base
from embforge.training.rule_groups import Optimizers, RuleGroups, rule_groups


class DistributedSparseEmbedding(ShardedEmbeddingCollection):
    """Sums and means of bags, over tables whose rows are split over any number of ranks.

    The rows of all tables with the same width and dtype are put one after the other into a stacked table. The module
    computes the row of a feature's id in that table, its key; rank `key % ranks` holds the row. In a forward, each rank
    adds up the rows that it holds, and a reduce-scatter adds up these partial sums. In a backward, an all-gather gets
    the gradients of all samples. The arguments are those of `ShardedEmbeddingCollection`, without a plan.
    """

    def __init__(
        self, spec: CollectionSpec, process_group: object = None, optimizer: Optimizers = None, **options: Any
    ) -> None:
        for feature in spec.features:
            if not feature.kind.sums:
                allowed = ", ".join(name for name, kind in POOLINGS.items() if kind.sums)
                raise SpecError(
                    f"feature {feature.name!r}: pooling={feature.pooling!r} cannot be reduced and scattered; allowed: "
                    f"{allowed}; use ShardedEmbeddingCollection for other poolings"
                )
        if options.get("formats") is not None:
            raise ValueError(
                "formats: a reduce-scatter adds fp32 numbers; leave formats away, or use ShardedEmbeddingCollection"
            )
        if options.get("pools") not in (None, "all"):
            raise ValueError(
                f"pools={options['pools']!r}: a reduce-scatter adds pools of all bags; allowed: 'all'; use "
                "ShardedEmbeddingCollection for 'different'"
            )
        options["pools"] = "all"
        members = _stacked(spec)
        stacked = members.spec
        if isinstance(optimizer, Mapping):
            optimizer = _of_stacked(rule_groups(optimizer, spec), members)
        super().__init__(
            stacked, ShardPlan.row_wise(stacked), process_group, optimizer, _bases=members.bases, **options
        )
        self.original_spec, self._members = spec, members.members
        arrays = replace(self.distributor.arrays, exchange_adds=True)
        self.network = replace(self.network, arrays=arrays)
        vectors = self.vectors
        self.vectors = ReducedVectors(
            arrays, vectors.exchange, vectors.forward_wire, vectors.backward_wire, vectors.plan, vectors.kernels
        )

    def load_full(self, tables: Mapping[str, Tensor]) -> None:
        """Copies this rank's rows from whole tables, by the names of the original spec. All tables of the same width
        and dtype must be loaded together."""
        for name, members in self._members.items():
            known = [tables[member.name] for member in members if member.name in tables]
            if known and len(known) != len(members):
                missing = ", ".join(repr(m.name) for m in members if m.name not in tables)
                raise ValueError(
                    f"tables: {missing} missing; tables of the same width and dtype are stacked, so load all of them "
                    "together"
                )
            if known:
                super().load_full({name: torch.cat(known)})

    def full(self, table: str) -> Tensor:
        """The whole table, on every rank. All ranks must call."""
        name, rows = self._rows_in_stack(table)
        return super().full(name)[rows]

    def full_optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The whole states of a table, on every rank. All ranks must call."""
        name, rows = self._rows_in_stack(table)
        return {state: values[rows] for state, values in super().full_optimizer_state(name).items()}

    def shards(self, table: str) -> dict[tuple[range, range], Tensor]:
        """The live parts of a stacked table that this rank holds. Raises ValueError for a table of the original spec,
        whose rows are mixed with those of other tables: see `full`."""
        if table in self._members:
            return super().shards(table)
        name, _ = self._rows_in_stack(table)
        members = ", ".join(repr(member.name) for member in self._members[name])
        raise ValueError(
            f"table {table!r}: a rank holds every n-th row of {members} together; get the whole table with full()"
        )

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        """Freezes or unfreezes tables. Tables of the same width and dtype are stacked, so all of them must be named."""
        stacked = {self._rows_in_stack(name)[0] for name in names}
        for name in stacked:
            missing = [member.name for member in self._members[name] if member.name not in names]
            if missing:
                raise ValueError(
                    f"table {missing[0]!r}: tables of the same width and dtype are stacked, so they are frozen "
                    "together or not at all; name all of them: "
                    f"{', '.join(repr(member.name) for member in self._members[name])}"
                )
        super()._set_trainable(tuple(sorted(stacked)), wanted)

    def _rows_in_stack(self, table: str) -> tuple[str, slice]:
        """The stacked table that has the rows of a table of the original spec, and these rows."""
        self.original_spec.table(table)
        for name, members in self._members.items():
            firsts = accumulate((m.num_embeddings for m in members), initial=0)
            for first, member in zip(firsts, members, strict=False):
                if member.name == table:
                    return name, slice(first, first + member.num_embeddings)
        raise AssertionError(table)


@dataclass(frozen=True)
class _Stacked:
    """A spec with stacked tables."""

    spec: CollectionSpec
    bases: list[Base]
    members: dict[str, list[TableSpec]]


def _stacked(spec: CollectionSpec) -> _Stacked:
    members: dict[str, list[TableSpec]] = {}
    for table in spec.tables:
        if not table.ids_are_rows:
            raise SpecError(
                f"table {table.name!r}: remap={table.remap} is not allowed here, because tables of the same width and "
                "dtype are stacked; use ShardedEmbeddingCollection, or turn ids into rows before the call"
            )
        members.setdefault(f"dim{table.embedding_dim}_{table.dtype}", []).append(table)
    bases: dict[str, tuple[str, Base]] = {}
    """For each table, the stacked table that has its rows, and where."""
    for name, tables in members.items():
        first = 0
        for table in tables:
            bases[table.name] = name, Base(first, table.num_embeddings, table.name)
            first += table.num_embeddings
    stacked = tuple(
        TableSpec(name, sum(t.num_embeddings for t in tables), tables[0].embedding_dim, tables[0].dtype)
        for name, tables in members.items()
    )
    features = tuple(
        # A padding id outside of its table must not become a row of another table.
        FeatureSpec(
            f.name,
            bases[f.table][0],
            f.pooling,
            f.weighted,
            f.hotness,
            f.padding_idx if spec.absent_id(f) is None else -1,
        )
        for f in spec.features
    )
    of_features = [bases[feature.table][1] for feature in spec.features]
    return _Stacked(CollectionSpec(stacked, features, spec.output_dtype, spec.name), of_features, members)


def _of_stacked(groups: RuleGroups | None, stacked: _Stacked) -> RuleGroups:
    """The groups of stacked tables. Raises ValueError for tables that are stacked but have different optimizers."""
    assert groups is not None
    for members in stacked.members.values():
        first, *others = [groups.of_table(groups.tables.index(member.name)) for member in members]
        for member, group in zip(members[1:], others, strict=True):
            if group is not first:
                raise ValueError(
                    f"optimizer: tables {members[0].name!r} and {member.name!r} have the same width and dtype, so "
                    "they are stacked and trained by one optimizer; name them in one entry, or use "
                    "ShardedEmbeddingCollection"
                )
    return groups.for_parts(list(stacked.members), [members[0].name for members in stacked.members.values()])


class ReducedVectors(Vectors):
    """The exchange of vectors by reduce-scatter and all-gather: it adds up partial pools. The results of all ranks have
    the same columns."""

    def to_samples(self, distributed: Distributed, pooled: Tensor | None, sequence: Tensor | None) -> ReceivedVectors:
        assert pooled is not None and (sequence is None or not sequence.numel())
        scattered = self.exchange.reduce_scatter("vectors", pooled, distributed.samples)
        return ReceivedVectors(scattered.reshape(-1), (0,) * self.arrays.geometry.world_size, None, None, [])

    def gradient_buffers(self, distributed: Distributed) -> GradientBuffers:
        size = distributed.samples[self.rank] * sum(self.widths[self.rank])
        partials = torch.empty(size, dtype=self.backward_wire.dtype, device=self.arrays.device)
        return GradientBuffers(partials, (0,) * self.arrays.geometry.world_size, None, None)

    def to_owners(
        self, distributed: Distributed, gradient_buffers: GradientBuffers, sequences: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = gradient_buffers.partials.view(distributed.samples[self.rank], sum(self.widths[self.rank]))
        return self.exchange.all_gather("gradients", rows, distributed.samples), None
