"""The exact bytes that a training step sends, by the formulas of `codegen/planner/traffic.py` and counted ids.

What a rank sends to itself is not counted; an all-reduce counts the bytes of its tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.planner.traffic import (
    Duplicates,
    Wire,
    header_bytes,
    id_bytes,
    reductions_of,
    replica_bytes,
    row_bytes,
    vector_bytes,
    worth_requesting,
)
from embforge.codegen.rules.rule import Update
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.placement import TablePlacement

COUNTERS = (
    "header",
    "ids",
    "vectors",
    "gradients",
    "node_vectors",
    "rail_vectors",
    "rail_gradients",
    "node_gradients",
    "weight_gradients",
    "row_norms",
    "replicas",
)
"""The names of the byte counters."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counted:
    """The counts of a step."""

    samples: tuple[int, ...]
    """The samples of each rank."""
    ids: Ints
    """`[rank, stream]`: ids that a rank puts into a stream."""
    asked: Ints
    """`[rank, stream]`: pools that a rank requests, if it requests pools at all."""
    touched: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    """By table and by the ranks that hold a row (one per piece of columns): how many such rows get a gradient from any
    rank. Only tables whose columns are split have an entry."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes by counter, `[source, destination]`; those of an all-reduce are on the diagonal."""

    pairs: dict[str, Ints]

    def sent(self, rank: int) -> dict[str, int]:
        """A rank's counters; those that stay zero are left out."""
        counts = {name: int(pairs[rank].sum()) for name, pairs in self.pairs.items()}
        return {name: count for name, count in counts.items() if count}


def traffic_of(geometry: Geometry, counted: Counted, wire: Wire | None = None, update: Update | None = None) -> Traffic:
    """The bytes of a training step. A forward alone sends header, ids and vectors of all kinds."""
    wire = wire or Wire()
    n = geometry.world_size
    samples = np.asarray(counted.samples, dtype=np.int64)
    pairs = {name: np.zeros((n, n), dtype=np.int64) for name in COUNTERS}
    for d, streams in enumerate(geometry.streams_to):
        described = [geometry.streams[t] for t in streams]
        sent = counted.ids[:, list(streams)]
        pooled = sum(not stream.sequence for stream in described)
        weighted = sent[:, [stream.weighted for stream in described]].sum(axis=1)
        requesting = requesters_of(geometry, d, counted) if wire.pools == "different" else np.zeros(n, dtype=bool)
        asked = np.where(requesting, counted.asked[:, list(geometry.requestable_to[d])].sum(axis=1), 0)
        counts = len(streams) + len(geometry.requestable_to[d]) * (wire.pools == "different")
        pairs["header"][:, d] = header_bytes(counts, geometry.placement.num_remapped)
        pairs["ids"][:, d] = id_bytes(sent.sum(axis=1), samples, pooled, weighted, geometry.wide_ids, asked)
        pairs["vectors"][d] = _vectors(geometry, d, counted, wire.forward, requesting)
        pairs["gradients"][:, d] = _vectors(geometry, d, counted, wire.gradients, np.zeros(n, dtype=bool))
        if wire.weight_gradients:
            pairs["weight_gradients"][d] = 4 * weighted
    _hierarchical(geometry, samples, wire, pairs)
    _row_norms(geometry, counted, reductions_of(update), pairs["row_norms"])
    for counts in pairs.values():
        np.fill_diagonal(counts, 0)
    replicated = geometry.replicated.tables if geometry.replicated else ()
    payload = sum(replica_bytes(table.num_embeddings, table.embedding_dim) for table in replicated)
    np.fill_diagonal(pairs["replicas"], payload if update is not None else 0)
    return Traffic(pairs)


def requesters_of(geometry: Geometry, owner: int, counted: Counted) -> NDArray[np.bool_]:
    """For each rank: whether it requests pools from the owner."""
    streams = list(geometry.requestable_to[owner])
    columns = np.array([geometry.direct_columns[t] for t in streams], dtype=np.int64)
    asked = counted.asked[:, streams]
    requests = worth_requesting(asked @ (columns + 1), np.asarray(counted.samples), columns.sum())
    return np.asarray(requests & (columns.sum() > 0))


def _vectors(geometry: Geometry, owner: int, counted: Counted, format: str, requesting: NDArray[np.bool_]) -> Ints:
    """The bytes of vectors between an owner and every rank."""
    local = geometry.locals[owner]
    samples = np.asarray(counted.samples, dtype=np.int64)
    if local is None:
        return np.zeros_like(samples)
    pooled, sequence = np.zeros_like(samples), np.zeros_like(samples)
    for feature, local_feature in zip(local.layout.features, local.features, strict=True):
        if feature.column is None:
            sequence += row_bytes(format, feature.width) * counted.ids[:, local_feature.stream]
        elif feature.column < local.direct_width:
            pooled += row_bytes(format, feature.width) * np.where(
                requesting, counted.asked[:, local_feature.stream], samples
            )
    return pooled + sequence


def _hierarchical(geometry: Geometry, samples: Ints, wire: Wire, pairs: dict[str, Ints]) -> None:
    local = geometry.locals[0]
    if local is None or not local.hierarchical_width:
        return
    widths = [f.width for f in local.layout.features if f.column is not None and f.column >= local.direct_width]
    m, nodes = geometry.placement.node_size, geometry.placement.nodes
    by_place = samples.reshape(nodes, m)
    node, place = np.divmod(np.arange(geometry.world_size), m)
    same_node = node[:, None] == node
    same_place = place[:, None] == place
    inside = 4 * sum(widths) * by_place.sum(axis=0)[place]
    pairs["node_vectors"][:] = np.where(same_node, inside, 0)
    pairs["node_gradients"][:] = np.where(same_node, inside[:, None], 0)
    for name, format, to_rank in (
        ("rail_vectors", wire.forward, True),
        ("rail_gradients", wire.gradients, False),
    ):
        bytes_ = vector_bytes(sum(row_bytes(format, width) for width in widths), samples, 0)
        pairs[name][:] = np.where(same_place, bytes_ if to_rank else bytes_[:, None], 0)


def _row_norms(geometry: Geometry, counted: Counted, reductions: int, pairs: Ints) -> None:
    for (_, holders), rows in counted.touched.items():
        for source in holders:
            for destination in set(holders):  # once, however many columns it holds
                pairs[source, destination] += 4 * rows * reductions


def count_ids(
    geometry: Geometry,
    batches: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    duplicates: Duplicates = "keep",
) -> Counted:
    """Counts the ids of a step, from each rank's `values` and feature-major `offsets`.

    If one rank pools whole bags, all ids are sent, so that positions in a bag do not change. Otherwise padding and ids
    outside their table are not sent.
    """
    counts = np.zeros((geometry.world_size, len(geometry.streams)), dtype=np.int64)
    asked = np.zeros_like(counts)
    touched: dict[str, list[NDArray[Any]]] = {}
    samples = tuple((len(offsets) - 1) // len(geometry.spec.features) for _, offsets in batches)
    for rank, (values, offsets) in enumerate(batches):
        for bucketing in geometry.bucketings:
            feature = geometry.spec.features[bucketing.feature]
            placement = geometry.placement.by_name[feature.table]
            first, last = (int(offsets[(bucketing.feature + i) * samples[rank]]) for i in (0, 1))
            given = ids = values[first:last]
            borders = offsets[bucketing.feature * samples[rank] : (bucketing.feature + 1) * samples[rank] + 1]
            bags = np.repeat(np.arange(samples[rank]), np.diff(borders))
            ids = ids[(ids >= 0) & (ids < placement.table.num_embeddings)]
            trained = ids if feature.padding_idx is None else ids[ids != feature.padding_idx]
            sequence = not feature.kind.pooled
            for shard, stream in enumerate(bucketing.streams):
                mine = _of_shard(ids if sequence else trained, placement, len(bucketing.streams), shard)
                if sequence and duplicates == "merge":
                    mine = np.unique(mine)
                whole = not sequence and len(bucketing.streams) == 1
                counts[rank, stream] = len(given) if whole else len(mine)
                if not sequence:
                    here = np.ones(len(given), dtype=bool) if whole else _is_in(given, mine)
                    asked[rank, stream] = _asked(given, bags, here, placement.table.num_embeddings, feature.weighted)
            if placement.columns_split:
                touched.setdefault(feature.table, []).append(trained)
    held: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, rows in touched.items():
        held |= _by_holders(geometry.placement.by_name[name], np.unique(np.concatenate(rows)))
    return Counted(samples, counts, asked, held)


def _by_holders(placement: TablePlacement, rows: NDArray[Any]) -> dict[tuple[str, tuple[int, ...]], int]:
    """How many of the rows each combination of ranks holds, one rank per piece of columns."""
    holders = [np.asarray(piece.owners)[_shard_of(rows, placement, len(piece.owners))] for piece in placement.pieces]
    combinations, counts = np.unique(np.stack(holders, axis=1), axis=0, return_counts=True)
    name = placement.table.name
    return {(name, tuple(map(int, ranks))): int(n) for ranks, n in zip(combinations, counts, strict=True)}


def _is_in(ids: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isin(ids, np.unique(wanted))


def _asked(ids: NDArray[Any], bags: NDArray[Any], here: NDArray[np.bool_], rows: int, weighted: bool) -> int:
    """The number of pools that are requested: one per bag that is not empty, but only one for all bags that have the
    same single id and no weight."""
    lengths = np.bincount(bags[here], minlength=bags[-1] + 1 if len(bags) else 0)
    single = here & (lengths[bags] == 1) & (ids >= 0) & (ids < rows) & (not weighted)
    return int((lengths > 0).sum() - single.sum() + len(np.unique(ids[single])))


def _of_shard(ids: NDArray[Any], placement: TablePlacement, shards: int, shard: int) -> NDArray[Any]:
    found: NDArray[Any] = ids[_shard_of(ids, placement, shards) == shard]
    return found


def _shard_of(ids: NDArray[Any], placement: TablePlacement, shards: int) -> NDArray[Any]:
    """For each id: the row shard of `shards` that holds it."""
    found: NDArray[Any] = (
        ids % shards if placement.by == "modulo" else ids // -(-placement.table.num_embeddings // shards)
    )
    return found
