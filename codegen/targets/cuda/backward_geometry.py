"""How rows to be updated map to lanes, groups and blocks: every number that the CUDA backward states.

A *group* of lanes of one warp handles a row, one vector of ELEMENTS numbers a lane, rows wider than a warp in column
tiles. Vectors never run over a row's end. Tables whose rows are updated by the same code are a *bucket*.
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
"""Share of a warp's lanes with a vector, from which a cut into tiles is good enough."""
MOST_TILES_TRIED = 4
MOST_KEYS = 2**31 - 1
"""Of 32 bits, the sentinel included."""
MOST_ROWS = 8
"""In flight a lane."""
USUAL_BLOCKS, HEAVY_BLOCKS = 4, 3
"""Of 256 threads, for whose registers a multiprocessor has room, whatever the plan asks for."""
HEAVY_STATES, HEAVY_ELEMENTS = 2, 8
"""States an element and elements a lane from which a lane holds so many numbers that blocks are heavy."""


@dataclass(frozen=True)
class RowBucket:
    """Tables of one dim and dtype whose items are read alike. The fields are those of the struct in the source."""

    index: int
    dim: int
    dtype: str
    item: str
    """What a gradient is read as: the output's dtype, or fp32 if one is divided first."""
    weighted: bool
    selects: bool
    """Whether some of its features do."""
    tables: tuple[int, ...]
    first: int
    """Of its tables, in the order of keys."""
    placed: TableLayout
    elements: int
    item_load: int
    """Bytes of one gradient load."""
    state_load: int
    vectors: int
    tiles: int
    lanes: int
    rows: int
    """Gradients in flight a lane."""
    warps: int
    """A block."""

    @property
    def per_warp(self) -> int:
        return WARP // self.lanes

    @property
    def groups(self) -> int:
        """Rows that a block works on at once."""
        return self.per_warp * self.warps

    @property
    def item_bytes(self) -> int:
        """Of a gradient."""
        return self.dim * DTYPES[self.item].bytes

    @property
    def use(self) -> float:
        """Share of a warp's lanes that have a vector, over all tiles."""
        return self.per_warp * self.vectors / (self.tiles * WARP)

    @property
    def name(self) -> str:
        kinds = ("_weighted" if self.weighted else "") + ("_selected" if self.selects else "")
        read = "" if self.item == "fp32" else f"_from_{self.item}"
        return f"d{self.dim}_{self.dtype}{kinds}{read}"


def backward_params(plan: Plan) -> CudaBackwardParams:
    """The plan's parameters, which a cuda plan of a backward is known to have."""
    assert isinstance(plan.params, CudaBackwardParams)
    return plan.params


def rule_of(plan: Plan) -> Rule | None:
    return plan.update.rule if plan.update else None


def sums_rows(plan: Plan) -> bool:
    """Whether anything is added up over a row."""
    rule = rule_of(plan)
    return plan.op == "weight_gradient" or (rule is not None and bool(program_of(rule).reductions))


def is_row_wise(plan: Plan) -> bool:
    """Whether a row is one piece: it is added up, or its rule keeps a number of it."""
    rule = rule_of(plan)
    return sums_rows(plan) or (rule is not None and any(state.extent == "row" for state in rule.states))


def row_buckets(plan: Plan) -> tuple[RowBucket, ...]:
    """The buckets, widest rows first."""
    groups: dict[tuple[int, str, str, bool, bool], list[int]] = {}
    scaled = {f.index for f in scaled_features(plan)}
    using: dict[int, list[FeatureLayout]] = {}
    for f in plan.layout.features:
        using.setdefault(f.table_index, []).append(f)
    for index, placed in enumerate(plan.layout.tables):
        table = placed.table
        item = "fp32" if any(f.index in scaled for f in using[index]) else plan.spec.output_dtype
        weighted = any(f.feature.weighted for f in using[index])
        selects = any(f.feature.kind.selects for f in using[index])
        groups.setdefault((table.embedding_dim, table.dtype, item, weighted, selects), []).append(index)
    ordered = sorted(groups.items(), key=lambda group: -group[0][0] * DTYPES[group[0][1]].bytes)
    firsts = accumulate((len(tables) for _, tables in ordered), initial=0)
    return tuple(
        _bucket(plan, index, first, tuple(tables), _steps(plan, [f for t in tables for f in using[t]], scaled), *key)
        for index, ((key, tables), first) in enumerate(zip(ordered, firsts, strict=False))
    )


def key_tables(plan: Plan) -> tuple[int, ...]:
    """Tables in the order of keys: a bucket's side by side."""
    return tuple(table for bucket in row_buckets(plan) for table in bucket.tables)


def key_firsts(plan: Plan) -> tuple[int, ...]:
    """The key of row 0 of each of `key_tables`, and behind them the sentinel: the key of whatever has no gradient."""
    return tuple(accumulate((plan.spec.tables[table].num_embeddings for table in key_tables(plan)), initial=0))


def key_dtype(plan: Plan) -> str:
    return "int32" if key_firsts(plan)[-1] <= MOST_KEYS else "int64"


def scaled_features(plan: Plan) -> tuple[FeatureLayout, ...]:
    """Features whose items are not read as the caller left them: divided, or converted beside such."""
    if plan.op == "weight_gradient":  # divides where it reads
        return ()
    narrow = plan.spec.output_dtype != "fp32"
    divided = {f.table_index for f in plan.layout.features if f.feature.kind.divides}
    return tuple(f for f in plan.layout.features if f.feature.kind.divides or (narrow and f.table_index in divided))


def scaled_columns(plan: Plan) -> dict[int, int]:
    """From the index of a scaled feature with columns to its first one of `scaled`, 16-byte aligned."""
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
    return any(f.column is None for f in scaled_features(plan))


def partial_width(plan: Plan) -> int:
    """Floats from one partial sum to the next."""
    return max((_padded(bucket.dim) for bucket in row_buckets(plan)), default=4)


def min_blocks(plan: Plan) -> int:
    """Blocks a multiprocessor must hold, for `__launch_bounds__` of the kernels that move rows: no more than there are
    registers for."""
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
    params, placed = backward_params(plan), plan.layout.tables[tables[0]]
    size, item_size = DTYPES[dtype].bytes, DTYPES[item].bytes
    element_states = [state for state in placed.states if state.extent == "element"]
    widest = max(size, item_size, STATE_BYTES if element_states or plan.op == "reduce" else 0)
    row_access = min(largest_power_of_two(step, params.vector_bytes) for step in (placed.stride_bytes, dim * size))
    elements = min(row_access // size, params.vector_bytes // widest)
    item_load = min(largest_power_of_two(step * item_size, 16) for step in (elements, *steps))
    words = elements * item_size // item_load * max(1, item_load // 4)  # registers that a gradient takes, once loaded
    offsets = [state.offset for state in element_states]
    state_load = min(
        largest_power_of_two(step, min(16, elements * STATE_BYTES)) for step in (placed.state_stride_bytes, *offsets)
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
        placed=placed,
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
    """Elements from where gradients begin to any gradient of these features: what loads are to be aligned to."""
    layout, steps = plan.layout, set[int]()
    for f in features:
        if f.column is None:
            steps |= {other.dim for other in layout.sequence_features}
        elif f.index not in scaled:  # those begin at multiples of 16 bytes
            steps |= {layout.output_width, f.column}
        if f.feature.slots:
            steps.add(f.dim)
    return steps


def _tiles(vectors: int, row_wise: bool) -> int:
    """Column tiles of a row: the fewest that use most of a warp's lanes; the fewest at all where a row is one piece."""

    def use(tiles: int) -> float:
        lanes = -(-vectors // tiles)
        return vectors / (tiles * lanes) * (WARP // lanes * lanes) / WARP

    fewest = -(-vectors // WARP)
    candidates = range(fewest, fewest + (1 if row_wise else MOST_TILES_TRIED))
    return next((t for t in candidates if use(t) >= GOOD_USE), max(candidates, key=use))
