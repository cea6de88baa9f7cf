"""The cost of a placement: memory and bytes of every rank, seconds of a step. docs/planning.md has the formulas.

All ranks have batches of the same size and draw ids by the same law, so every source sends the same to a destination.
A table adds to each of its ranks a column of numbers (`METRICS`). A plan's cost is a function of the sum of these
columns, so it is cheap to try one more kind for one table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import layout_of
from embforge.codegen.planner.access import Access, Floats
from embforge.codegen.planner.topology import Topology
from embforge.codegen.planner.traffic import (
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
from embforge.codegen.sharding.geometry import INT32_ROWS, is_hierarchical
from embforge.codegen.sharding.placement import Piece, Placement, TablePlacement
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

METRICS = (
    "memory",  # bytes of rows and states
    "read",  # bytes that lookups move: rows and their pools
    "updated",  # bytes that updates move: gradients, rows and states
    "streams",
    "pooled",  # streams of pooled features
    "ids",  # from one source
    "weighted",  # those of them that have a weight
    "vector_row",  # bytes per sample of direct pooled columns
    "vector_rows",  # bytes of rows that travel one by one, to one source
    "gradient_row",
    "gradient_rows",
    "norms",  # bytes of row norms sent to other owners of the same rows
    "requestable",  # streams whose pools can be requested
    "requested",  # pools that one source would request
    "requested_numbers",  # how many numbers these pools have
    "requested_bytes",
    "columns",  # numbers per sample of direct pooled columns
)
"""The numbers that a table adds to a rank, in this order."""
ROW = {name: index for index, name in enumerate(METRICS)}
TOTALS = ("inside_row", "rail_vector_row", "rail_gradient_row", "replicas", "wide")
"""The numbers that a table adds to all ranks equally: bytes per sample of hierarchical columns, bytes of the
all-reduce, and whether its rows need 64-bit ids."""
SORT_BYTES = 16
"""Bytes of work space, and bytes moved, per id of an update."""
LINE_BYTES = 64
"""Memory is read and written in whole lines of this size, so narrower rows cost as much."""
LOOKUP_LAUNCHES, UPDATE_LAUNCHES = 2, 6
PHASES = ("ids", "lookup", "vectors", "gradients", "update", "replicas")
"""The phases of a step, in their order; in each, all ranks wait for the slowest."""


@dataclass(frozen=True)
class Step:
    """The work of every rank in a training step."""

    batch_size: int = 2048
    """Samples per rank."""
    access: Access = field(default_factory=Access)
    update: Update | None = None
    """The update rule; None: a forward only."""
    wire: Wire = field(default_factory=Wire)


@dataclass(frozen=True, eq=False)
class Share:
    """The numbers that one placed table adds."""

    ranks: Any
    """Indices of the ranks that it adds to, or a slice of all."""
    values: Floats
    """`[METRICS, ranks]`"""
    totals: Floats

    @property
    def memory(self) -> float:
        """Bytes of rows and states on the rank that gets the most."""
        return float(self.values[0].max())


@dataclass(frozen=True)
class Costs:
    """Computes what tables add to the ranks of a topology in a step."""

    spec: CollectionSpec
    topology: Topology
    step: Step
    remap_bytes: int = 0
    """Bytes of the rows of ids, which every rank holds."""
    num_remapped: int = 0
    """The number of tables whose ids are not their rows."""

    @cached_property
    def features(self) -> dict[str, list[FeatureSpec]]:
        """The features of each table."""
        by_table: dict[str, list[FeatureSpec]] = defaultdict(list)
        for feature in self.spec.features:
            by_table[feature.table].append(feature)
        return by_table

    @cached_property
    def result_bytes(self) -> float:
        """Bytes of the results of a rank's own samples."""
        layout = layout_of(self.spec)
        rows = sum(self.step.access.ids_per_sample(f.feature) * f.dim for f in layout.sequence_features)
        return float(self.step.batch_size * (layout.output_width + rows) * DTYPES[self.spec.output_dtype].bytes)

    def share(self, placement: TablePlacement) -> Share:
        """The numbers that a table adds with this placement."""
        totals = np.zeros(len(TOTALS))
        if placement.replicated:
            return self._replicated(placement.table, totals)
        n = self.topology.world_size
        owners = np.concatenate([np.asarray(piece.owners) for piece in placement.pieces])
        ranks = np.unique(owners)
        values = np.zeros((len(METRICS), len(ranks)))
        known: dict[tuple[int, int], Floats] = {}
        for piece in placement.pieces:
            like = (piece.width, len(piece.owners))  # pieces of equal width and number of shards cost the same
            if like not in known:
                known[like] = self._piece(placement, piece)
        all_pieces = [known[piece.width, len(piece.owners)] for piece in placement.pieces]
        at = np.searchsorted(ranks, owners)
        if len(at) == len(ranks):
            values[:, at] = np.concatenate(all_pieces, axis=1)
        else:  # some rank holds several pieces
            _add_shared(placement.pieces, all_pieces, ranks, values)
        self._norms(placement, ranks, values)
        if placement.hierarchical:
            for feature in self.features[placement.table.name]:
                if is_hierarchical(feature, placement):
                    totals[:3] += [row_bytes(f, placement.table.embedding_dim) for f in ("fp32", *self._formats)]
        capacity = max(placement.rows(piece, 0).capacity for piece in placement.pieces)
        totals[4] = capacity > INT32_ROWS
        return Share(slice(None) if len(ranks) == n else ranks, values, totals)

    @property
    def _formats(self) -> tuple[str, str]:
        return self.step.wire.forward, self.step.wire.gradients

    def _replicated(self, table: TableSpec, totals: Floats) -> Share:
        n, step = self.topology.world_size, self.step
        row, state = row_of(table.embedding_dim, table.dtype, step.update)
        line, state_line = _lines(row), _lines(state)
        rows, dim = table.num_embeddings, table.embedding_dim
        values = np.zeros((len(METRICS), 1))  # the same on all ranks
        wanted = sum(step.batch_size * step.access.ids_per_sample(f) for f in self.features[table.name])
        gradient = replica_bytes(rows, dim) if step.update is not None else 0
        values[ROW["memory"]] = rows * (row + state) + gradient
        values[ROW["read"]] = wanted * line + 4 * dim * step.batch_size * len(self.features[table.name])
        if step.update is not None:
            touched = step.access.unique(wanted * n, rows)
            values[ROW["updated"]] = (
                wanted * (_lines(4 * dim) + SORT_BYTES) + 2 * gradient + 2 * touched * (line + state_line)
            )
        totals[3] = gradient
        return Share(slice(None), values, totals)

    def _piece(self, placement: TablePlacement, piece: Piece) -> Floats:
        """`[METRICS, owners]` of one piece."""
        n, step, access = self.topology.world_size, self.step, self.step.access
        table, shards, width = placement.table, len(piece.owners), piece.width
        asked = access.shares(table.num_embeddings, shards, placement.by)
        held = Access().shares(table.num_embeddings, shards, placement.by)
        row, state = row_of(width, table.dtype, step.update)
        state += 4 * reductions_of(step.update) * placement.columns_split  # norms are stored with the states
        values = np.zeros((len(METRICS), shards))
        values[ROW["memory"]] = placement.rows(piece, 0).capacity * (row + state)
        wanted = 0.0
        for feature in self.features[table.name]:
            sequence = not feature.kind.pooled
            count = step.batch_size * access.ids_per_sample(feature)
            wanted += count
            merged = sequence and step.wire.duplicates == "merge"
            ids = access.unique(count, table.num_embeddings) * held if merged else count * asked
            written = ids if sequence else float(step.batch_size)
            values[ROW["read"]] += n * (ids * _lines(row) + 4 * width * written)
            values[ROW["streams"]] += 1
            values[ROW["ids"]] += ids
            forward, gradients = (row_bytes(format, width) for format in self._formats)
            if sequence:
                values[ROW["vector_rows"]] += forward * ids
                values[ROW["gradient_rows"]] += gradients * ids
            else:
                values[ROW["pooled"]] += 1
                values[ROW["weighted"]] += ids * feature.weighted
            if not sequence and not is_hierarchical(feature, placement):
                values[ROW["vector_row"]] += forward
                values[ROW["gradient_row"]] += gradients
                if step.wire.pools == "different":
                    pools = access.pools(feature, step.batch_size, table.num_embeddings, asked, held)
                    values[ROW["requestable"]] += 1
                    values[ROW["requested"]] += pools
                    values[ROW["requested_numbers"]] += pools * width
                    values[ROW["requested_bytes"]] += pools * forward
                    values[ROW["columns"]] += width
            if step.update is not None:
                values[ROW["updated"]] += n * ids * (_lines(4 * width) + SORT_BYTES)
        if step.update is not None:
            touched = access.unique(wanted * n, table.num_embeddings) * held
            values[ROW["updated"]] += 2 * touched * (_lines(row) + _lines(state))
        return values

    def _norms(self, placement: TablePlacement, ranks: Any, values: Floats) -> None:
        reductions = reductions_of(self.step.update)
        if not reductions or not placement.columns_split:
            return
        table = placement.table
        wanted = sum(self.step.batch_size * self.step.access.ids_per_sample(f) for f in self.features[table.name])
        touched = self.step.access.unique(wanted * self.topology.world_size, table.num_embeddings)
        shards = np.concatenate([np.arange(len(piece.owners)) for piece in placement.pieces])
        owners = np.concatenate([np.asarray(piece.owners) for piece in placement.pieces])
        # A norm is sent to every other rank that holds columns of the row. A rank may hold several pieces only if all
        # pieces have the same shards; otherwise (in a grid with unequal numbers of ranks) no two pieces share a rank.
        others = np.full(len(owners), len(placement.pieces) - 1)
        if len({len(piece.owners) for piece in placement.pieces}) == 1:
            different = np.unique(shards * self.topology.world_size + owners) // self.topology.world_size
            others = np.bincount(different)[shards] - 1
        held = np.concatenate(
            [Access().shares(table.num_embeddings, len(piece.owners), placement.by) for piece in placement.pieces]
        )
        np.add.at(values[ROW["norms"]], np.searchsorted(ranks, owners), 4 * reductions * touched * held * others)


def _lines(bytes_: int) -> int:
    return -(-bytes_ // LINE_BYTES) * LINE_BYTES


@lru_cache(maxsize=4096)
def row_of(width: int, dtype: Any, update: Update | None) -> tuple[int, int]:
    """Bytes of a row and of its states in memory, padding included."""
    alone = CollectionSpec((TableSpec("t", 1, width, dtype),), (FeatureSpec("f", "t"),))
    (table,) = layout_of(alone, update).tables
    return table.stride_bytes, table.state_stride_bytes


def _add_shared(pieces: Sequence[Piece], costs: Sequence[Floats], ranks: Any, values: Floats) -> None:
    """Adds up the costs of pieces per rank. Pieces with the same rank and shard share a stream, which counts once."""
    of_streams = [ROW[name] for name in ("streams", "pooled", "ids", "weighted", "requestable", "requested")]
    taken: set[tuple[int, int, int]] = set()
    for piece, cost in zip(pieces, costs, strict=True):
        for shard, rank in enumerate(piece.owners):
            column = cost[:, shard].copy()
            if (rank, len(piece.owners), shard) in taken:
                column[of_streams] = 0
            taken.add((rank, len(piece.owners), shard))
            values[:, np.searchsorted(ranks, rank)] += column


@dataclass(frozen=True, eq=False)
class Loads:
    """The sums over all tables on every rank; or, with one more axis in front, several variants of them at once."""

    costs: Costs
    values: Floats
    """`[..., METRICS, ranks]`"""
    totals: Floats
    """`[..., TOTALS]`"""

    @classmethod
    def empty(cls, costs: Costs) -> Loads:
        return cls(costs, np.zeros((len(METRICS), costs.topology.world_size)), np.zeros(len(TOTALS)))

    def variants(self, shares: Sequence[Share]) -> Loads:
        """One variant per share: these loads with the share added."""
        values = np.repeat(self.values[None], len(shares), axis=0)
        for variant, share in zip(values, shares, strict=True):
            variant[:, share.ranks] += share.values
        return Loads(self.costs, values, self.totals + np.stack([share.totals for share in shares]))

    def add(self, share: Share, sign: int = 1) -> None:
        """Adds a share in place; `sign=-1` subtracts it."""
        self.values[:, share.ranks] += sign * share.values
        self.totals[:] += sign * share.totals

    def __getitem__(self, metric: str) -> Floats:
        row: Floats = self.values[..., ROW[metric], :]
        return row

    def total(self, name: str) -> Floats:
        """One of `TOTALS`, of shape `[..., 1]`."""
        total: Floats = self.totals[..., TOTALS.index(name), None]
        return total

    def to_owner(self) -> dict[str, Floats]:
        """Bytes from one rank to each owner (ids, gradients) or from each owner to one rank (vectors), by counter."""
        step = self.costs.step
        wire, samples = step.wire, step.batch_size
        wide = self.total("wide") > 0.5
        requests = worth_requesting(self["requested_numbers"] + self["requested"], samples, self["columns"]) & (
            self["columns"] > 0
        )
        asked = np.where(requests, self["requested"], 0.0)
        by_counter = {
            "header": header_bytes(self["streams"] + self["requestable"], self.costs.num_remapped),
            "ids": id_bytes(self["ids"], samples, self["pooled"], self["weighted"], wide, asked),
            "vectors": np.where(requests, self["requested_bytes"] + self["vector_rows"], self._all_vectors),
        }
        if step.update is not None:
            by_counter["gradients"] = vector_bytes(self["gradient_row"], samples, self["gradient_rows"])
            if wire.weight_gradients:
                by_counter["weight_gradients"] = 4 * self["weighted"]
        return by_counter

    @property
    def _all_vectors(self) -> Floats:
        """Bytes of vectors from each owner to one rank if the pools of all bags are sent."""
        all_bytes: Floats = vector_bytes(self["vector_row"], self.costs.step.batch_size, self["vector_rows"])
        return all_bytes

    def hierarchical(self) -> dict[str, Floats]:
        """Bytes of hierarchical columns that every rank sends, by counter, of shape `[..., 1]`."""
        topology, step = self.costs.topology, self.costs.step
        others, nodes = topology.ranks_per_node - 1, topology.nodes
        inside = self.total("inside_row") * (step.batch_size * nodes * others)
        rail = step.batch_size * (nodes - 1)
        by_counter = {"node_vectors": inside, "rail_vectors": self.total("rail_vector_row") * rail}
        if step.update is not None:
            by_counter |= {"rail_gradients": self.total("rail_gradient_row") * rail, "node_gradients": inside}
        return by_counter

    def buffers(self) -> Floats:
        """Bytes of a rank in addition to rows and states: what it sends and receives, the next batch's ids, its
        results, and the rows of ids. The pools of all bags are computed, whether they are sent or not."""
        n, step = self.costs.topology.world_size, self.costs.step
        between = self.to_owner()
        ids = between["ids"] + between["header"]
        moved = 2 * ids + self._all_vectors + between.get("gradients", 0)
        passes = 1 if step.update is None else 2
        apart = passes * (2 * n * step.batch_size * self.total("inside_row") + self.costs.result_bytes)
        apart += self.costs.remap_bytes
        total: Floats = moved.sum(axis=-1, keepdims=True) + n * (moved + SORT_BYTES * self["ids"]) + apart
        return total

    def memory(self) -> Floats:
        """Bytes that every rank needs: rows, states and buffers."""
        return self["memory"] + self.buffers()

    def phases(self) -> dict[str, Floats]:
        """Seconds of every rank in each phase."""
        topology, step = self.costs.topology, self.costs.step
        between = self.to_owner()
        spent = dict(zip(between, _exchanges(np.stack(list(between.values())), topology), strict=True))
        nothing = np.zeros_like(self["read"])
        seconds = {
            "ids": spent["header"] + spent["ids"],
            "lookup": self["read"] / topology.lookup_bandwidth + LOOKUP_LAUNCHES * topology.launch,
            "vectors": spent["vectors"] + self._by_nodes("vectors"),
            "gradients": nothing,
            "update": nothing,
            "replicas": nothing,
        }
        if step.update is not None:
            seconds["gradients"] = spent["gradients"] + spent.get("weight_gradients", 0.0) + self._by_nodes("gradients")
            seconds["update"] = self["updated"] / topology.update_bandwidth + UPDATE_LAUNCHES * topology.launch
            if self["norms"].any():
                slowest = topology.rail if topology.nodes > 1 else topology.node_link
                asked = self["norms"].any(axis=-1, keepdims=True)
                seconds["update"] += asked * slowest.latency + self["norms"] / slowest.bandwidth
            seconds["replicas"] = nothing + _all_reduce(self.total("replicas"), topology)
        return seconds

    def _by_nodes(self, what: str) -> Any:
        topology, bytes_ = self.costs.topology, self.hierarchical()
        if not self.total("inside_row").any():
            return 0.0
        inside = topology.node_link.time(bytes_[f"node_{what}"], topology.ranks_per_node - 1)
        outside = topology.rail.time(bytes_[f"rail_{what}"], topology.nodes - 1)
        return (self.total("inside_row") > 0) * (inside + outside)

    def seconds(self) -> float:
        """Seconds of a step: phases follow each other, and each takes as long as its slowest rank."""
        return float(sum(times.max() for times in self.phases().values()))


def loads_of(placement: Placement, costs: Costs) -> Loads:
    """The loads of a placement: the sum over all its tables."""
    loads = Loads.empty(costs)
    for table in placement.tables:
        loads.add(costs.share(table))
    return loads


def costs_of(placement: Placement, topology: Topology, step: Step) -> Costs:
    """Costs on machines like the topology's, with the placement's number of ranks and size of nodes."""
    n, m = placement.world_size, placement.node_size
    sized = replace(topology, nodes=n // m, ranks_per_node=m)
    return Costs(placement.spec, sized, step, placement.remap_bytes, placement.num_remapped)


def links_of(to_owner: Floats, topology: Topology) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes that every rank sends within its node and by its rail, and receives by either, `[..., ranks]` each."""
    n, m = topology.world_size, topology.ranks_per_node
    nodes = to_owner.reshape(*to_owner.shape[:-1], -1, m).sum(axis=-1)
    node = nodes.repeat(m, axis=-1)
    return node - to_owner, nodes.sum(axis=-1, keepdims=True) - node, to_owner * (m - 1), to_owner * (n - m)


def _exchanges(to_owner: Floats, topology: Topology) -> Floats:
    """Seconds of all-to-alls, one per row of `to_owner`. The way back (from owners) has the same bytes with directions
    swapped, so it takes as long; both kinds of links work at the same time."""
    node_out, rail_out, node_in, rail_in = links_of(to_owner, topology)
    n, m = topology.world_size, topology.ranks_per_node
    times = np.zeros_like(node_out)
    links = ((topology.node_link, m - 1, node_out, node_in), (topology.rail, n - m, rail_out, rail_in))
    for link, peers, out, into in links:
        if peers:
            taken = np.maximum(out, into) / link.bandwidth
            times = np.maximum(times, taken + (link.latency + link.message * peers))
    return times


def _all_reduce(bytes_: Floats, topology: Topology) -> Floats:
    """Seconds of one all-reduce: data are reduced and gathered inside nodes; between nodes each rank sends its part."""
    m, nodes = topology.ranks_per_node, topology.nodes
    inside = topology.node_link.time(2 * bytes_ * (m - 1) / m, m - 1)
    outside = topology.rail.time(2 * bytes_ / m * (nodes - 1) / nodes, nodes - 1)
    return np.asarray((bytes_ > 0) * (inside + outside))
