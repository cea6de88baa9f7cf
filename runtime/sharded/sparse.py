"""`DistributedSparseEmbedding`: pooled lookups in tables that are fused by width, as SparseOperationKit's."""

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
from embforge.sharded.stages.all2all import Arrived, Room, Vectors
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.stage_metadata import Base
from embforge.training.rule_groups import Optimizers, RuleGroups, rule_groups


class DistributedSparseEmbedding(ShardedEmbeddingCollection):
    """Sums and means of bags over tables of any number of ranks: rank `key % ranks` holds the row of a key.

    Tables of equal width and dtype are rows of one, one behind the other; a key is a row there, which the module
    works out
    from a feature and its id. Forward each rank adds up the rows it owns and a reduce-scatter the partial sums;
    backward an
    all-gather brings the gradients of all samples. Arguments: as `ShardedEmbeddingCollection`, without a plan.
    """

    def __init__(
        self, spec: CollectionSpec, process_group: object = None, optimizer: Optimizers = None, **options: Any
    ) -> None:
        for feature in spec.features:
            if not feature.kind.sums:
                allowed = ", ".join(name for name, kind in POOLINGS.items() if kind.sums)
                raise SpecError(
                    f"feature {feature.name!r}: pooling={feature.pooling!r} cannot be reduced and scattered; allowed: "
                    f"{allowed}; ShardedEmbeddingCollection has all poolings"
                )
        if options.get("formats") is not None:
            raise ValueError("formats: a reduce-scatter adds fp32; ShardedEmbeddingCollection has other formats")
        if options.get("pools") not in (None, "all"):
            raise ValueError(
                f"pools={options['pools']!r}: a reduce-scatter adds pools of all bags; allowed: 'all'; "
                "ShardedEmbeddingCollection has 'different' too"
            )
        options["pools"] = "all"
        members = _fuse(spec)
        fused = members.spec
        if isinstance(optimizer, Mapping):
            optimizer = _of_fused(rule_groups(optimizer, spec), members)
        super().__init__(fused, ShardPlan.row_wise(fused), process_group, optimizer, _bases=members.bases, **options)
        self.given_spec, self._members = spec, members.members
        wiring = replace(self.distributor.wiring, added_on_the_way=True)
        self.network = replace(self.network, wiring=wiring)
        vectors = self.vectors
        self.vectors = ReducedVectors(
            wiring, vectors.exchange, vectors.forward_wire, vectors.backward_wire, vectors.plan, vectors.kernels
        )

    def load_full(self, tables: Mapping[str, Tensor]) -> None:
        """Takes this rank's rows of whole tables, by the names of the given spec; all tables of a width at once."""
        for name, members in self._members.items():
            known = [tables[member.name] for member in members if member.name in tables]
            if known and len(known) != len(members):
                missing = ", ".join(repr(m.name) for m in members if m.name not in tables)
                raise ValueError(f"tables: {missing} missing; tables of one width are one, so give all of them")
            if known:
                super().load_full({name: torch.cat(known)})

    def full(self, table: str) -> Tensor:
        """The whole table, on every rank. All ranks must call."""
        name, rows = self._place(table)
        return super().full(name)[rows]

    def full_optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The whole states of a table, on every rank. All ranks must call."""
        name, rows = self._place(table)
        return {state: found[rows] for state, found in super().full_optimizer_state(name).items()}

    def shards(self, table: str) -> dict[tuple[range, range], Tensor]:
        """Of a table of the given spec there is no part that a rank holds as it stands: see `full`."""
        if table in self._members:
            return super().shards(table)
        name, _ = self._place(table)
        members = ", ".join(repr(member.name) for member in self._members[name])
        raise ValueError(f"table {table!r}: a rank holds every n-th row of {members} together; full() has whole tables")

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        """Tables of one width are one, so all of them are trained or none."""
        fused = {self._place(name)[0] for name in names}
        for name in fused:
            missing = [member.name for member in self._members[name] if member.name not in names]
            if missing:
                raise ValueError(
                    f"table {missing[0]!r}: tables of one width are one, frozen together or not at all; name all of "
                    f"them: {', '.join(repr(member.name) for member in self._members[name])}"
                )
        super()._set_trainable(tuple(sorted(fused)), wanted)

    def _place(self, table: str) -> tuple[str, slice]:
        """The fused table that holds a table of the given spec, and its rows there."""
        self.given_spec.table(table)
        for name, members in self._members.items():
            firsts = accumulate((m.num_embeddings for m in members), initial=0)
            for first, member in zip(firsts, members, strict=False):
                if member.name == table:
                    return name, slice(first, first + member.num_embeddings)
        raise AssertionError(table)


@dataclass(frozen=True)
class _Fused:
    spec: CollectionSpec
    bases: list[Base]
    members: dict[str, list[TableSpec]]


def _fuse(spec: CollectionSpec) -> _Fused:
    members: dict[str, list[TableSpec]] = {}
    for table in spec.tables:
        if not table.ids_are_rows:
            raise SpecError(
                f"table {table.name!r}: remap={table.remap} is not allowed here, where tables of one width are one; "
                "use ShardedEmbeddingCollection, or turn ids into rows before the call"
            )
        members.setdefault(f"dim{table.embedding_dim}_{table.dtype}", []).append(table)
    home: dict[str, tuple[str, Base]] = {}
    for name, tables in members.items():
        first = 0
        for table in tables:
            home[table.name] = name, Base(first, table.num_embeddings, table.name)
            first += table.num_embeddings
    fused = tuple(
        TableSpec(name, sum(t.num_embeddings for t in tables), tables[0].embedding_dim, tables[0].dtype)
        for name, tables in members.items()
    )
    features = tuple(
        # A padding id that is no row must not be one of another table.
        FeatureSpec(
            f.name,
            home[f.table][0],
            f.pooling,
            f.weighted,
            f.hotness,
            f.padding_idx if spec.absent_id(f) is None else -1,
        )
        for f in spec.features
    )
    bases = [home[feature.table][1] for feature in spec.features]
    return _Fused(CollectionSpec(fused, features, spec.output_dtype, spec.name), bases, members)


def _of_fused(groups: RuleGroups | None, fused: _Fused) -> RuleGroups:
    """The groups of tables that hold several each: tables of one width are one, and trained by one optimizer."""
    assert groups is not None
    for members in fused.members.values():
        first, *others = [groups.of_table(groups.tables.index(member.name)) for member in members]
        for member, group in zip(members[1:], others, strict=True):
            if group is not first:
                raise ValueError(
                    f"optimizer: tables {members[0].name!r} and {member.name!r} have one width and dtype and so are "
                    "one here, trained by one optimizer; name them in one entry, or use ShardedEmbeddingCollection"
                )
    return groups.for_parts(list(fused.members), [members[0].name for members in fused.members.values()])


class ReducedVectors(Vectors):
    """Partial pools are added on their way: every rank's results have the same columns."""

    def to_samples(self, done: Distributed, pooled: Tensor | None, sequence: Tensor | None) -> Arrived:
        assert pooled is not None and (sequence is None or not sequence.numel())
        scattered = self.exchange.reduce_scatter("vectors", pooled, done.samples)
        return Arrived(scattered.reshape(-1), (0,) * self.wiring.geometry.world_size, None, None, [])

    def room(self, done: Distributed) -> Room:
        size = done.samples[self.rank] * sum(self.widths[self.rank])
        partials = torch.empty(size, dtype=self.backward_wire.dtype, device=self.wiring.device)
        return Room(partials, (0,) * self.wiring.geometry.world_size, None, None)

    def to_owners(
        self, done: Distributed, room: Room, sequences: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = room.partials.view(done.samples[self.rank], sum(self.widths[self.rank]))
        return self.exchange.all_gather("gradients", rows, done.samples), None
