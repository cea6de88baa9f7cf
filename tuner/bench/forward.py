"""`embforge bench`: times a spec's lookup, the same lookup by other libraries, and the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embforge.codegen.dtypes import FLOATS, OUTPUT_DTYPES
from embforge.codegen.errors import ToolchainError
from embforge.codegen.layout import layout_of
from embforge.codegen.params import Params
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.collection import EmbeddingCollection
from embforge.number_formats import torch_dtype
from embforge.tuner.bench.limit import gather_limit
from embforge.tuner.bench.peers import PEERS, Peer, PeerUnavailableError, fill_table, output_types, peer_named
from embforge.tuner.bench.report import (
    GATHER_LIMIT,
    LIMIT,
    OURS,
    BenchReport,
    last_level_cache_bytes,
    machine_facts,
    timings_of,
)
from embforge.tuner.measure.paired import Contender, measure
from embforge.tuner.measure.quiet import Clocks, others_since
from embforge.tuner.workload.tensors import input_of
from embforge.tuner.workload.workload import Batch, Workload, make_batch, parse

MIN_BATCHES = 4
MAX_BATCHES = 64
CACHES_TO_PASS = 4
"""All batches together read rows of this many times the last-level cache's size, if the tables are that large."""
SWEEP_SHARE = 0.15
"""Share of the time that is spent on finding the limit's best prefetch."""

TOLERANCE = {torch_dtype(name): max(2e-5, 2.08 * FLOATS[name].resolution) for name in OUTPUT_DTYPES}
"""By the type that results are rounded to: the largest difference that two libraries' results may have, relative to the
largest number in them. If their types differ, the larger tolerance holds."""


class NotedContender(Contender, Protocol):
    """A contender with a note for people: how the library is called."""

    @property
    def note(self) -> str: ...


class Subject(NamedTuple):
    """What is timed: a spec under a workload on a target, with these batches."""

    spec: CollectionSpec
    workload: str
    on: str
    batches: Sequence[Batch]


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

    A peer that is not installed or cannot look up the spec is in the report's `skipped`. `ToolchainError` if `on` is
    "cuda" and no CUDA device is usable; `WorkloadError` for a workload string that cannot be read.
    """
    check_device(on)
    workload = parse(workload) if isinstance(workload, str) else workload or Workload()
    batches = enough_batches(spec, workload, seed)
    peers: list[Peer] = []
    skipped: dict[str, str] = {}
    with torch.no_grad():
        module = filled_module(spec, device=on, params=params) if ours else None
        if module is not None:
            peers.append(our_contender(module, on))
        for name in against:
            try:
                peers.append(peer_named(name, spec, batches, on))
            except PeerUnavailableError as error:
                skipped[name] = str(error)
        differences, disagreeing = compare(peers, batches[:2])
        contenders: list[NotedContender] = [*peers]
        if limit and target_named(on).is_native:
            contenders.append(gather_limit(spec, tables_of(spec, module)).best(batches, seconds * SWEEP_SHARE))
        return timed(
            Subject(spec, str(workload), on, batches),
            contenders,
            seconds=seconds,
            seed=seed,
            differences=differences,
            disagreeing=disagreeing,
            skipped=skipped,
        )


def timed(
    subject: Subject, contenders: Sequence[NotedContender], *, seconds: float, seed: int, **fields: Any
) -> BenchReport:
    """Times the contenders, interleaved. `fields` are the fields of the report that do not follow from the times."""
    spec, batches = subject.spec, subject.batches
    synchronize = torch.cuda.synchronize if target_named(subject.on).needs_gpu else lambda: None
    clocks = Clocks.now()
    measurement = measure(contenders, batches, seconds=seconds, seed=seed, synchronize=synchronize)
    others = others_since(clocks)
    compared = {name for name in measurement.samples if OURS in measurement.samples} - {OURS}
    return BenchReport(
        spec=spec.name or "collection",
        workload=subject.workload,
        on=subject.on,
        batches=len(batches),
        ids=sum(b.values.size for b in batches) // len(batches),
        row_bytes=sum(row_bytes(spec, b) for b in batches) // len(batches),
        table_bytes=table_bytes(spec),
        timings=timings_of(measurement, {c.name: c.note for c in contenders}),
        ratios={name: measurement.ratio(name, OURS) for name in PEERS if name in compared},
        limit_share=measurement.ratio(LIMIT, OURS) if LIMIT in compared else None,
        both_share=measurement.ratio([LIMIT, GATHER_LIMIT], OURS) if GATHER_LIMIT in compared else None,
        others=others,
        machine=machine_facts(),
        **fields,
    )


def check_device(on: str) -> None:
    """Raises `ToolchainError` if `on` is "cuda" and no CUDA device is usable."""
    if target_named(on).needs_gpu and not torch.cuda.is_available():
        raise ToolchainError(
            "bench --on cuda needs a CUDA device and a torch built for it; torch finds none; use --on cpu"
        )


def filled_module(spec: CollectionSpec, **options: Any) -> EmbeddingCollection:
    """A module with the same rows as the peers: every table is filled by `fill_table`."""
    module = EmbeddingCollection(spec, **options)
    for index, table in enumerate(spec.tables):
        fill_table(module.weight(table.name).data, index)
    return module


def tables_of(spec: CollectionSpec, module: EmbeddingCollection | None) -> list[Tensor]:
    """The tables that a limit reads: those of the module under test, or of a new module if None is passed."""
    module = module or filled_module(spec)
    return [module.weight(table.name).data for table in spec.tables]


def enough_batches(spec: CollectionSpec, workload: Workload, seed: int) -> list[Batch]:
    """Batches to rotate through: so many that a large table's rows do not stay in the caches."""
    first = make_batch(spec, workload, seed)
    bytes_to_read = min(CACHES_TO_PASS * last_level_cache_bytes(), table_bytes(spec))
    wanted = math.ceil(bytes_to_read / max(1, row_bytes(spec, first)))
    count = min(max(wanted, MIN_BATCHES), MAX_BATCHES)
    return [first, *(make_batch(spec, workload, seed + index) for index in range(1, count))]


def row_bytes(spec: CollectionSpec, batch: Batch) -> int:
    """Bytes of rows that a lookup of the batch reads."""
    layout = layout_of(spec)
    total = 0
    for feature in layout.features:
        where = batch.feature(feature.index)
        total += (where.stop - where.start) * layout.tables[feature.table_index].row_bytes
    return total


def table_bytes(spec: CollectionSpec) -> int:
    """Bytes of all tables together, padding included."""
    return sum(t.table.num_embeddings * t.stride_bytes for t in layout_of(spec).tables)


def our_contender(module: EmbeddingCollection, device: str) -> Peer:
    """Our lookup as a contender."""
    pooled = not module.layout.sequence_features
    widths = [feature.width for feature in module.layout.features]

    def prepare(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        return input_of(batch, device)[:3]

    def run(arguments: tuple[Tensor, Tensor, Tensor | None]) -> Any:
        return module(*arguments) if pooled else module.forward_dict(*arguments)

    def outputs(result: Any) -> list[Tensor]:
        return list(result.split(widths, 1)) if pooled else list(result.values())

    return Peer(OURS, module.plan().uri, prepare, run, outputs, output_types(module.spec))


def compare(contenders: Sequence[Peer], batches: Sequence[Batch]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The largest relative difference of each contender from the first one, and the names of those whose difference is
    larger than rounding explains."""
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
                if not difference <= allowed and peer.name not in disagreeing:  # written so that NaN disagrees
                    disagreeing.append(peer.name)
    return differences, tuple(disagreeing)
