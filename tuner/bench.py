"""`embforge bench`: a spec's lookup timed beside the libraries people use today and beside the machine's limit."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError
from embforge.codegen.layout import layout_of
from embforge.codegen.machine import cpu_model, package_version
from embforge.codegen.params import Params
from embforge.codegen.spec import CollectionSpec
from embforge.collection import EmbeddingCollection
from embforge.tuner.limit import gather_limit
from embforge.tuner.measure import Contender, Measurement, Ratio, measure
from embforge.tuner.peers import PEERS, Peer, PeerUnavailableError, fill_table, peer_named
from embforge.tuner.quiet import QUIET, Clocks, others_since
from embforge.tuner.workload import Batch, Workload, make_batch, parse

OURS = "embforge"
LIMIT = "limit"
MIN_BATCHES = 4
MAX_BATCHES = 64
CACHES_TO_PASS = 4
"""Rows of all batches together are this many last-level caches, where the tables are that large."""
USUAL_CACHE_BYTES = 32 << 20
SWEEP_SHARE = 0.15
"""Part of the time that goes into finding the limit's best prefetch."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference between two libraries' results of that type, relative to the largest number in them."""


@dataclass(frozen=True)
class Timing:
    """One contender's time a call, in microseconds."""

    name: str
    note: str
    """How the library was called, or what the limit prefetched."""
    median: float
    low: float
    high: float
    """20 % and 80 % quantiles."""
    repeats: int
    samples: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """One workload's result. Ratios are paired by round: above 1 means that we are faster."""

    spec: str
    workload: str
    on: str
    batches: int
    ids: int
    """Mean ids a batch."""
    row_bytes: int
    """Mean bytes of rows that a batch reads."""
    table_bytes: int
    timings: tuple[Timing, ...]
    ratios: dict[str, Ratio]
    """Each peer's time over ours."""
    limit_share: Ratio | None
    """The gather limit's time over ours: 1 means that rows cannot be read faster."""
    differences: dict[str, float]
    """Largest difference of each contender's outputs from the first one's, relative to the largest number."""
    disagreeing: tuple[str, ...]
    """Contenders whose outputs differ by more than rounding explains."""
    skipped: dict[str, str]
    """Peers that could not take part, and why."""
    others: float | None
    """CPUs that other processes used on average meanwhile, where the system tells."""
    machine: dict[str, str]

    @property
    def disturbed(self) -> bool:
        """Whether others used so much of the machine that the times are not to be trusted."""
        return self.others is not None and self.others > QUIET

    @property
    def fastest_peer(self) -> str | None:
        """The peer that comes closest to us (or is furthest ahead)."""
        return min(self.ratios, key=lambda name: self.ratios[name].median, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest peer we are."""
        return self.ratios[self.fastest_peer].median if self.fastest_peer is not None else None

    def timing(self, name: str) -> Timing | None:
        """The contender's timing, if it took part."""
        return next((t for t in self.timings if t.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data, all samples included."""
        return {
            **asdict(self),
            "fastest_peer": self.fastest_peer,
            "speedup": self.speedup,
            "disturbed": self.disturbed,
        }


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
    if on == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("bench --on cuda needs a CUDA device and a torch built for it; none is here; use --on cpu")
    if isinstance(workload, str):
        workload = parse(workload)
    workload = workload or Workload()
    batches = _batches(spec, workload, seed)
    contenders: list[Contender] = []
    comparable: list[Peer] = []
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    with torch.no_grad():
        module = _module(spec, on, params) if ours else None
        if module is not None:
            comparable.append(_our_contender(module, on))
        for name in against:
            try:
                comparable.append(peer_named(name, spec, batches, on))
            except PeerUnavailableError as error:
                skipped[name] = str(error)
        contenders += comparable
        notes |= {peer.name: peer.note for peer in comparable}
        differences, disagreeing = _compare(comparable, batches[:2])
        if limit and on == "cpu":
            best = gather_limit(spec, _tables(spec, module)).best(batches, seconds * SWEEP_SHARE)
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
        row_bytes=sum(_row_bytes(spec, b) for b in batches) // len(batches),
        table_bytes=_table_bytes(spec),
        timings=tuple(_timing(taken, name, notes[name]) for name in taken.samples),
        ratios={p.name: taken.ratio(p.name, OURS) for p in comparable if ours and p.name != OURS},
        limit_share=taken.ratio(LIMIT, OURS) if ours and LIMIT in taken.samples else None,
        differences=differences,
        disagreeing=disagreeing,
        skipped=skipped,
        others=others,
        machine=machine_facts(),
    )


def machine_facts() -> dict[str, str]:
    """What a reader must know about the machine to judge a time."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "last_level_cache": f"{last_level_cache_bytes() >> 20} MB",
        "load_before": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fbgemm": package_version("fbgemm-gpu-cpu") or package_version("fbgemm-gpu") or "not installed",
        "embforge": package_version("embforge") or "not installed",
    }


def last_level_cache_bytes() -> int:
    """Size of the largest cache that Linux reports, or a usual one."""
    sizes = [_bytes(p.read_text()) for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=USUAL_CACHE_BYTES)


def _module(spec: CollectionSpec, on: str, params: Params | None) -> EmbeddingCollection:
    module = EmbeddingCollection(spec, device=on, params=params)
    for index, table in enumerate(spec.tables):
        fill_table(module.weight(table.name).data, index)
    return module


def _our_contender(module: EmbeddingCollection, device: str) -> Peer:
    pooled = not module.layout.sequence_features
    widths = [placed.width for placed in module.layout.features]

    def prepare(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = None if batch.weights is None else torch.from_numpy(batch.weights).to(device)
        return torch.from_numpy(batch.values).to(device), torch.from_numpy(batch.offsets).to(device), weights

    def run(arguments: tuple[Tensor, Tensor, Tensor | None]) -> Any:
        return module(*arguments) if pooled else module.forward_dict(*arguments)

    def outputs(result: Any) -> list[Tensor]:
        return list(result.split(widths, 1)) if pooled else list(result.values())

    return Peer(OURS, module.plan().uri, prepare, run, outputs)


def _tables(spec: CollectionSpec, module: EmbeddingCollection | None) -> list[Tensor]:
    """Our own tables for the limit to read; without us, a module's that nobody calls."""
    module = module or _module(spec, "cpu", None)
    return [module.weight(table.name).data for table in spec.tables]


def _batches(spec: CollectionSpec, workload: Workload, seed: int) -> list[Batch]:
    """Enough batches that rotating through them does not turn a large table into a cached one."""
    first = make_batch(spec, workload, seed)
    to_pass = min(CACHES_TO_PASS * last_level_cache_bytes(), _table_bytes(spec))
    wanted = math.ceil(to_pass / max(1, _row_bytes(spec, first)))
    count = min(max(wanted, MIN_BATCHES), MAX_BATCHES)
    return [first, *(make_batch(spec, workload, seed + index) for index in range(1, count))]


def _row_bytes(spec: CollectionSpec, batch: Batch) -> int:
    layout = layout_of(spec)
    total = 0
    for placed in layout.features:
        where = batch.feature(placed.index)
        total += (where.stop - where.start) * layout.tables[placed.table_index].row_bytes
    return total


def _table_bytes(spec: CollectionSpec) -> int:
    return sum(t.table.num_embeddings * t.stride_bytes for t in layout_of(spec).tables)


def _compare(contenders: Sequence[Peer], batches: Sequence[Batch]) -> tuple[dict[str, float], tuple[str, ...]]:
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
            for ours, theirs in zip(expected, got, strict=True):
                scale = max(1e-30, float(ours.abs().max())) if ours.numel() else 1.0
                difference = float((ours.float() - theirs.float()).abs().max()) / scale if ours.numel() else 0.0
                allowed = max(TOLERANCE[ours.dtype], TOLERANCE[theirs.dtype])
                differences[peer.name] = max(differences[peer.name], difference)
                if not difference <= allowed and peer.name not in disagreeing:  # a NaN is a difference
                    disagreeing.append(peer.name)
    return differences, tuple(disagreeing)


def _timing(taken: Measurement, name: str, note: str) -> Timing:
    low, high = taken.spread(name)
    samples = tuple(round(s * 1e6, 3) for s in taken.samples[name])
    return Timing(name, note, taken.median(name) * 1e6, low * 1e6, high * 1e6, taken.repeats[name], samples)


def _bytes(text: str) -> int:
    text = text.strip()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * factor
