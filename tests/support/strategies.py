"""Hypothesis strategies for specs and for cases, from which batches are drawn."""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st

from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.params import CpuParams, CudaParams, Params, ReferenceParams
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.verify.cases import Case

LENGTHS = ["usual", "one", "none", "edges"] * 3 + ["deep"]
"""Bags of more than 4096 ids, whose canonical sum has a third level, take long: one batch in thirteen has some."""
CPU_PARAMS = (
    CpuParams(),
    CpuParams(prefetch_bytes=0, tile_vectors=2, rows_unrolled=4, stores="streaming", grain_bytes=16384),
    CpuParams(prefetch_bytes=1024, prefetch_level=1, tile_vectors=16, rows_unrolled=2, grain_bytes=262144, threads=2),
)
CUDA_PARAMS = (
    CudaParams(),
    CudaParams(block=128, pipeline=(2, 5), vector_bytes=8, id_tile=512, bags_per_block=64, interleave=2, long_bag=256),
    CudaParams(block=512, pipeline=(8, 2), id_tile=2048, bags_per_block=1024, interleave=16, long_bag=4096),
)
VARIANTS: dict[str, tuple[Params, ...]] = {
    "reference": (ReferenceParams(),) * 3,
    "cpu": CPU_PARAMS,
    "simt": CUDA_PARAMS,
    "cuda": CUDA_PARAMS,
}
"""Plan fields to run a backend with: few, because each is a compilation; `verify` covers all pairs of choices."""
DIMS = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 128, 257, 1000]))


@st.composite
def tables(draw: st.DrawFn, name: str, dims: st.SearchStrategy[int] = DIMS) -> TableSpec:
    return TableSpec(name, draw(st.integers(1, 60)), draw(dims), draw(st.sampled_from(TABLE_DTYPES)))


@st.composite
def features(draw: st.DrawFn, name: str, table: TableSpec) -> FeatureSpec:
    pooling = draw(st.sampled_from(list(POOLINGS)))
    hotness = draw(st.integers(1, 6)) if pooling == "concat" else draw(st.none() | st.integers(1, 12))
    return FeatureSpec(
        name,
        table.name,
        pooling,
        weighted=POOLINGS[pooling].weightable and draw(st.booleans()),
        hotness=hotness,
        padding_idx=draw(st.none() | st.integers(0, table.num_embeddings - 1)),
    )


@st.composite
def specs(
    draw: st.DrawFn, most_tables: int = 3, most_features: int = 5, dims: st.SearchStrategy[int] = DIMS
) -> CollectionSpec:
    """Any valid spec; every table is used, some by several features."""
    made = [draw(tables(f"t{i}", dims)) for i in range(draw(st.integers(1, most_tables)))]
    extra = draw(st.lists(st.sampled_from(made), max_size=max(most_features - len(made), 0)))
    order = draw(st.permutations(made + extra))
    return CollectionSpec(
        made,
        [draw(features(f"f{i}", table)) for i, table in enumerate(order)],
        draw(st.sampled_from(OUTPUT_DTYPES)),
    )


@st.composite
def cases(draw: st.DrawFn, most_samples: int = 9) -> Case:
    return Case(
        batch=draw(st.integers(0, most_samples)),
        lengths=draw(st.sampled_from(LENGTHS)),
        ids=draw(st.sampled_from(["uniform", "zipf", "same"])),
        id_dtype=draw(st.sampled_from(["int32", "int64"])),
        weights=draw(st.sampled_from(["absent", "normal", "special"])),
        bad_ids=draw(st.booleans()),
    )


seeds = st.integers(0, 2**32 - 1)

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


def examples(count: int) -> settings:
    """Settings for `count` examples that are always the same; `make soak` draws twenty times as many new ones."""
    return settings(max_examples=count * (20 if SOAK else 1), derandomize=not SOAK, deadline=None)
