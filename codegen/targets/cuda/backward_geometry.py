"""How rows to be updated map to lanes, groups and blocks: every number in the source of a CUDA backward.

A *group* of lanes of one warp handles a row, one vector of ELEMENTS numbers per lane. Rows wider than a warp are cut
into column tiles. Vectors never cross the end of a row. Tables whose rows are updated by the same code are a *bucket*.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import STATE_BYTES, FeatureLayout, TableLayout, largest_power_of_two
from embforge.codegen.params import CudaBackwardParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.rule import Rule
from embforge.codegen.targets.cuda.arch import WARP, arch_named

BASE_THREADS = 256
GOOD_USE = 0.8
"""The share of a warp's lanes that must have a vector for a number of tiles to be taken without trying more."""
MOST_TILES_TRIED = 4
MOST_KEYS = 2**31 - 1
"""The most keys, including the sentinel, that fit in 32 bits."""
MOST_ROWS = 8
"""The most rows in flight per lane."""
USUAL_BLOCKS, HEAVY_BLOCKS = 4, 3
"""The most blocks of 256 threads for whose registers a multiprocessor has room, even if the plan asks for more."""
HEAVY_STATES, HEAVY_ELEMENTS = 2, 8
"""States per element, or elements per lane, from which a lane holds so much that its block is heavy."""


@dataclass(frozen=True)
class RowBucket:
    """Tables of one dim and dtype whose gradients are read in the
    same way. Its numbers are those of the struct in the source."""

    index: int
    dim: int
    dtype: str
    item: str
    """The dtype as which gradients are read: the output's, or fp32 if some gradients are divided first."""
    weighted: bool
    """Whether any of its features is weighted."""
    selects: bool
    """Whether any of its features selects."""
    tables: tuple[int, ...]
    first: int
    """The position of its first table in the order of keys."""
    layout: TableLayout
    """The layout that all of its tables have."""
    elements: int
    item_load: int
    """Bytes of one gradient load."""
    state_load: int
    vectors: int
    tiles: int
    lanes: int
    rows: int
    """Gradients in flight per lane."""
    warps: int
    """Warps per block."""

    @property
    def per_warp(self) -> int:
        """Groups of lanes per warp."""
        return WARP // self.lanes

    @property
    def groups(self) -> int:
        """Rows that a block works on at once."""
        return self.per_warp * self.warps

    @property
    def item_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.dim * DTYPES[self.item].bytes

    @property
    def use(self) -> float:
        """Share of a warp's lanes that have a vector, over all tiles."""
        return self.per_warp * self.vectors / (self.tiles * WARP)

    @property
    def name(self) -> str:
        """The name of the struct in the source."""
        kinds = ("_weighted" if self.weighted else "") + ("_selected" if self.selects else "")
        read = "" if self.item == "fp32" else f"_from_{self.item}"
        return f"d{self.dim}_{self.dtype}{kinds}{read}"


def backward_params(plan: Plan) -> CudaBackwardParams:
    """The parameters of a cuda plan of a backward, with their type."""
    assert isinstance(plan.params, CudaBackwardParams)
    return plan.params


def rule_of(plan: Plan) -> Rule | None:
    """The plan's update rule, if it has an update."""
    return plan.update.rule if plan.update else None


def sums_rows(plan: Plan) -> bool:
    """Whether the plan's kernels add something up over a row."""
    rule = rule_of(plan)
    return plan.op == "weight_gradient" or (rule is not None and bool(program_of(rule).reductions))


def is_row_wise(plan: Plan) -> bool:
    """Whether a group must handle whole rows: something is added up over a row, or the rule has a state per row."""
    rule = rule_of(plan)
    return sums_rows(plan) or (rule is not None and any(state.extent == "row" for state in rule.states))


def row_buckets(plan: Plan) -> tuple[RowBucket, ...]:
    """The buckets, widest rows first."""
    groups: dict[tuple[int, str, str, bool, bool], list[int]] = {}
    scaled = {f.index for f in scaled_features(plan)}
    users: dict[int, list[FeatureLayout]] = {}
    for f in plan.layout.features:
        users.setdefault(f.table_index, []).append(f)
    for index, layout in enumerate(plan.layout.tables):
        table = layout.table
        item = "fp32" if any(f.index in scaled for f in users[index]) else plan.spec.output_dtype
        weighted = any(f.feature.weighted for f in users[index])
        selects = any(f.feature.kind.selects for f in users[index])
        groups.setdefault((table.embedding_dim, table.dtype, item, weighted, selects), []).append(index)
    ordered = sorted(groups.items(), key=lambda group: -group[0][0] * DTYPES[group[0][1]].bytes)
    firsts = accumulate((len(tables) for _, tables in ordered), initial=0)
    return tuple(
        _bucket(plan, index, first, tuple(tables), _steps(plan, [f for t in tables for f in users[t]], scaled), *key)
        for index, ((key, tables), first) in enumerate(zip(ordered, firsts, strict=False))
    )


def key_tables(plan: Plan) -> tuple[int, ...]:
    """The tables in the order of keys: those of a bucket follow each other."""
    return tuple(table for bucket in row_buckets(plan) for table in bucket.tables)


def key_firsts(plan: Plan) -> tuple[int, ...]:
    """The key of row 0 of each of `key_tables`, then the sentinel: the key of positions that have no gradient."""
    return tuple(accumulate((plan.spec.tables[table].num_embeddings for table in key_tables(plan)), initial=0))


def key_dtype(plan: Plan) -> str:
    """The narrowest id dtype that holds all keys."""
    return "int32" if key_firsts(plan)[-1] <= MOST_KEYS else "int64"


def scaled_features(plan: Plan) -> tuple[FeatureLayout, ...]:
    """The features whose gradients are not read as the caller passes them. They are divided first, or converted,
    because a feature of the same table is divided."""
    if plan.op == "weight_gradient":  # it divides when it reads
        return ()
    narrow = plan.spec.output_dtype != "fp32"
    divided = {f.table_index for f in plan.layout.features if f.feature.kind.divides}
    return tuple(f for f in plan.layout.features if f.feature.kind.divides or (narrow and f.table_index in divided))


def scaled_columns(plan: Plan) -> dict[int, int]:
    """The first column of `scaled` of every scaled feature that
    has columns, by the feature's index; 16-byte aligned."""
    columns = {}
    column = 0
    for f in scaled_features(plan):
        if f.column is not None:
            columns[f.index] = column
            column += _padded(f.width)
    return columns


def scaled_width(plan: Plan) -> int:
    """Columns of `scaled`."""
    return sum(_padded(f.width) for f in scaled_features(plan) if f.column is not None)


def scales_sequence(plan: Plan) -> bool:
    """Whether gradients of sequences are among those that are not read as the caller passes them."""
    return any(f.column is None for f in scaled_features(plan))


def partial_width(plan: Plan) -> int:
    """Floats from one partial sum to the next."""
    return max((_padded(bucket.dim) for bucket in row_buckets(plan)), default=4)


def min_blocks(plan: Plan) -> int:
    """The number of blocks that a multiprocessor must hold, for `__launch_bounds__` of the kernels that move rows: no
    more than there are registers for."""
    params, rule, buckets = backward_params(plan), rule_of(plan), row_buckets(plan)
    states = sum(state.extent == "element" for state in rule.states) if rule else 0
    heavy = states >= HEAVY_STATES or any(b.elements >= HEAVY_ELEMENTS for b in buckets)
    heavy |= sums_rows(plan) and any(b.tiles > 1 for b in buckets)
    heavy |= states > 0 and any(b.item != "fp32" for b in buckets)
    plain = not states and not sums_rows(plan) and all(b.dtype == b.item == "fp32" and not b.selects for b in buckets)
    most = HEAVY_BLOCKS if heavy else params.pipeline[1] if plain else USUAL_BLOCKS
    wanted = min(params.pipeline[1], most)
    return max(1, min(BASE_THREADS * wanted, arch_named(plan.arch).threads) // params.block)


def _padded(width: int) -> int:
    return -(-width // 4) * 4


def _bucket(
    plan: Plan,
    index: int,
    first: int,
    tables: tuple[int, ...],
    steps: set[int],
    dim: int,
    dtype: str,
    item: str,
    weighted: bool,
    selects: bool,
) -> RowBucket:
    params, layout = backward_params(plan), plan.layout.tables[tables[0]]
    size, item_size = DTYPES[dtype].bytes, DTYPES[item].bytes
    element_states = [state for state in layout.states if state.extent == "element"]
    widest = max(size, item_size, STATE_BYTES if element_states or plan.op == "reduce" else 0)
    row_access = min(largest_power_of_two(step, params.vector_bytes) for step in (layout.stride_bytes, dim * size))
    elements = min(row_access // size, params.vector_bytes // widest)
    item_load = min(largest_power_of_two(step * item_size, 16) for step in (elements, *steps))
    words = elements * item_size // item_load * max(1, item_load // 4)  # registers of a loaded gradient
    offsets = [state.offset for state in element_states]
    state_load = min(
        largest_power_of_two(step, min(16, elements * STATE_BYTES)) for step in (layout.state_stride_bytes, *offsets)
    )
    vectors = dim // elements
    tiles = _tiles(vectors, is_row_wise(plan))
    return RowBucket(
        index=index,
        dim=dim,
        dtype=dtype,
        item=item,
        weighted=weighted,
        selects=selects,
        tables=tables,
        first=first,
        layout=layout,
        elements=elements,
        item_load=item_load,
        state_load=state_load,
        vectors=vectors,
        tiles=tiles,
        lanes=-(-vectors // tiles),
        rows=max(1, min(MOST_ROWS, 16 * params.pipeline[0] // (4 * words))),
        warps=params.block // WARP,
    )


def _steps(plan: Plan, features: list[FeatureLayout], scaled: set[int]) -> set[int]:
    """Distances, in elements, between gradients of these features:
    loads must be aligned at multiples of all of them."""
    layout, steps = plan.layout, set[int]()
    for f in features:
        if f.column is None:
            steps |= {other.dim for other in layout.sequence_features}
        elif f.index not in scaled:  # scaled gradients begin at multiples of 16 bytes
            steps |= {layout.output_width, f.column}
        if f.feature.slots:
            steps.add(f.dim)
    return steps


def _tiles(vectors: int, row_wise: bool) -> int:
    """The number of column tiles of a row: the fewest that use most of a warp's lanes; if a group must handle whole
    rows, the fewest that are possible."""

    def use(tiles: int) -> float:
        lanes = -(-vectors // tiles)
        return vectors / (tiles * lanes) * (WARP // lanes * lanes) / WARP

    fewest = -(-vectors // WARP)
    candidates = range(fewest, fewest + (1 if row_wise else MOST_TILES_TRIED))
    return next((t for t in candidates if use(t) >= GOOD_USE), max(candidates, key=use))
