"""`embforge bench`: a spec's lookup timed beside the libraries people use today and beside the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError
from embforge.codegen.layout import layout_of
from embforge.codegen.params import Params
from embforge.codegen.spec import CollectionSpec
from embforge.collection import EmbeddingCollection
from embforge.tuner.bench.report import (
    LIMIT,
    OURS,
    BenchReport,
    last_level_cache_bytes,
    machine_facts,
    timings_of,
)
from embforge.tuner.bench.limit import gather_limit
from embforge.tuner.measure.paired import Contender, measure
from embforge.tuner.bench.peers import PEERS, Peer, PeerUnavailableError, fill_table, output_types, peer_named
from embforge.tuner.measure.quiet import Clocks, others_since
from embforge.tuner.workload.workload import Batch, Workload, make_batch, parse

MIN_BATCHES = 4
MAX_BATCHES = 64
CACHES_TO_PASS = 4
"""Rows of all batches together are this many last-level caches, where the tables are that large."""
SWEEP_SHARE = 0.15
"""Part of the time that goes into finding the limit's best prefetch."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference between two libraries' results that are rounded to that type, relative to the largest number in
them: of two types the coarser decides, feature by feature."""


def bench_spec(
    spec: CollectionSpec,
    *,
    on: str = "cpu",
    against: Sequence[str] = PEERS,
    workload: Workload | str | None = None,
    seconds: float = 10.0,
    ours: bool = True,
    limit: bool = True,
    params: Params | None = None,
    seed: int = 0,
) -> BenchReport:
    """Times the spec's lookup for about `seconds`, interleaved with the peers in `against` and the gather limit.

    A peer that is not installed or cannot serve the spec is in the report's `skipped`. `ToolchainError` if `on`
    is "cuda" and there is none; `WorkloadError` for a workload string that cannot be read.
    """
    check_device(on)
    workload = parse(workload) if isinstance(workload, str) else workload or Workload()
    batches = enough_batches(spec, workload, seed)
    contenders: list[Contender] = []
    comparable: list[Peer] = []
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    with torch.no_grad():
        module = filled_module(spec, device=on, params=params) if ours else None
        if module is not None:
            comparable.append(our_contender(module, on))
        for name in against:
            try:
                comparable.append(peer_named(name, spec, batches, on))
            except PeerUnavailableError as error:
                skipped[name] = str(error)
        contenders += comparable
        notes |= {peer.name: peer.note for peer in comparable}
        differences, disagreeing = compare(comparable, batches[:2])
        if limit and on == "cpu":
            best = gather_limit(spec, tables_of(spec, module)).best(batches, seconds * SWEEP_SHARE)
            contenders.append(best)
            notes[LIMIT] = str(best)
        synchronize = torch.cuda.synchronize if on == "cuda" else lambda: None
        clocks = Clocks.now()
        taken = measure(contenders, batches, seconds=seconds, seed=seed, synchronize=synchronize)
        others = others_since(clocks)
    return BenchReport(
        spec=spec.name or "collection",
        workload=str(workload),
        on=on,
        batches=len(batches),
        ids=sum(b.values.size for b in batches) // len(batches),
        row_bytes=sum(row_bytes(spec, b) for b in batches) // len(batches),
        table_bytes=table_bytes(spec),
        timings=timings_of(taken, notes),
        ratios={p.name: taken.ratio(p.name, OURS) for p in comparable if ours and p.name != OURS},
        limit_share=taken.ratio(LIMIT, OURS) if ours and LIMIT in taken.samples else None,
        differences=differences,
        disagreeing=disagreeing,
        skipped=skipped,
        others=others,
        machine=machine_facts(),
    )


def check_device(on: str) -> None:
    """`ToolchainError` if `on` is "cuda" and there is none."""
    if on == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("bench --on cuda needs a CUDA device and a torch built for it; none is here; use --on cpu")


def filled_module(spec: CollectionSpec, **options: Any) -> EmbeddingCollection:
    """A module whose rows are those that the peers have."""
    module = EmbeddingCollection(spec, **options)
    for index, table in enumerate(spec.tables):
        fill_table(module.weight(table.name).data, index)
    return module


def tables_of(spec: CollectionSpec, module: EmbeddingCollection | None) -> list[Tensor]:
    """Our own tables for the limit to read; without us, a module's that nobody calls."""
    module = module or filled_module(spec)
    return [module.weight(table.name).data for table in spec.tables]


def enough_batches(spec: CollectionSpec, workload: Workload, seed: int) -> list[Batch]:
    """Enough batches that rotating through them does not turn a large table into a cached one."""
    first = make_batch(spec, workload, seed)
    to_pass = min(CACHES_TO_PASS * last_level_cache_bytes(), table_bytes(spec))
    wanted = math.ceil(to_pass / max(1, row_bytes(spec, first)))
    count = min(max(wanted, MIN_BATCHES), MAX_BATCHES)
    return [first, *(make_batch(spec, workload, seed + index) for index in range(1, count))]


def row_bytes(spec: CollectionSpec, batch: Batch) -> int:
    """Bytes of rows that a lookup of the batch reads."""
    layout = layout_of(spec)
    total = 0
    for placed in layout.features:
        where = batch.feature(placed.index)
        total += (where.stop - where.start) * layout.tables[placed.table_index].row_bytes
    return total


def table_bytes(spec: CollectionSpec) -> int:
    """Bytes of all tables."""
    return sum(t.table.num_embeddings * t.stride_bytes for t in layout_of(spec).tables)


def our_contender(module: EmbeddingCollection, device: str) -> Peer:
    """A module's lookup."""
    pooled = not module.layout.sequence_features
    widths = [placed.width for placed in module.layout.features]

    def prepare(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = None if batch.weights is None else torch.from_numpy(batch.weights).to(device)
        return torch.from_numpy(batch.values).to(device), torch.from_numpy(batch.offsets).to(device), weights

    def run(arguments: tuple[Tensor, Tensor, Tensor | None]) -> Any:
        return module(*arguments) if pooled else module.forward_dict(*arguments)

    def outputs(result: Any) -> list[Tensor]:
        return list(result.split(widths, 1)) if pooled else list(result.values())

    return Peer(OURS, module.plan().uri, prepare, run, outputs, output_types(module.spec))


def compare(contenders: Sequence[Peer], batches: Sequence[Batch]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Every contender's largest relative difference from the first, and who differs more than rounding explains."""
    differences = {peer.name: 0.0 for peer in contenders[1:]}
    disagreeing: list[str] = []
    for batch in batches:
        expected: list[Tensor] = []
        for position, peer in enumerate(contenders):
            got = peer.outputs(peer.run(peer.prepare(batch)))
            if position == 0:
                expected = got
                continue
            types = zip(contenders[0].rounded_to, peer.rounded_to, strict=True)
            for ours, theirs, rounded_to in zip(expected, got, types, strict=True):
                scale = max(1e-30, float(ours.abs().max())) if ours.numel() else 1.0
                difference = float((ours.float() - theirs.float()).abs().max()) / scale if ours.numel() else 0.0
                allowed = max(TOLERANCE[dtype] for dtype in rounded_to)
                differences[peer.name] = max(differences[peer.name], difference)
                if not difference <= allowed and peer.name not in disagreeing:  # a NaN is a difference
                    disagreeing.append(peer.name)
    return differences, tuple(disagreeing)
