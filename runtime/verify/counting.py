"""Counts the memory traffic of one lookup, kernel by kernel, by running it in the SIMT executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.geometry import geometry_of, register_classes
from embforge.codegen.targets.cuda.launch import long_symbols, main_symbols, shape_of
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import metadata_of
from embforge.launch.simt.counters import SECTOR, KernelCounters, together
from embforge.launch.simt.forward import SimtForward, SimtOptions
from embforge.operator_arguments import sequence_elements


@dataclass(frozen=True)
class CountedKernel:
    """The counters of a kernel, and the number of its outputs."""

    name: str
    """A short name: forward, wide, long, merge, or all for the sum of them."""
    outputs: int
    """The number of bags, and of rows of features that are not pooled."""
    counters: KernelCounters
    whole_sectors: tuple[str, ...]
    """The tables whose rows are a multiple of 32 bytes, so that no row needs only a part of a sector."""

    def per_output(self, kind: str) -> float | None:
        """The number of sectors that were loaded of a kind of memory, per output; None without outputs."""
        return self.counters.loaded(kind).sectors / self.outputs if self.outputs else None

    def to_json(self) -> dict[str, Any]:
        """The counters as JSON data."""
        whole = self.counters.rows_of(self.whole_sectors)
        return self.counters.to_json() | {
            "name": self.name,
            "outputs": self.outputs,
            "id_sectors_per_output": self.per_output("ids"),
            "offset_sectors_per_output": self.per_output("offsets"),
            "whole_sector_rows_efficiency": whole.efficiency,
            "whole_sector_rows_active_lanes": whole.active_lanes,
        }


def count_lookup(plan: Plan, tables: Sequence[Tensor], batch: Batch, *, seed: int = 0) -> list[CountedKernel]:
    """The counters of each kernel that the lookup launches, and then their sum.

    The plan's target must be simt. Raises what a call of that backend raises.
    """
    kernel = kernel_of(Program(plan).text)
    assert isinstance(kernel, SimtForward)
    plan = kernel.plan  # has the symbols of the kernel's binary
    sizes = _ids_of_features(plan, batch)
    rows = [sizes[f.index] for f in plan.layout.sequence_features]
    elements = sequence_elements(plan.layout, rows)
    metadata = metadata_of(tables, "error")
    counted = kernel.run(metadata, tables, batch, elements, "error", SimtOptions(seed, count=True)).counters
    outputs = _outputs(plan, batch, sizes)
    whole = tuple(t.table.name for t in plan.layout.tables if t.row_bytes % SECTOR == 0)
    kernels = [CountedKernel(_short(c.kernel, plan.symbol), outputs[c.kernel], c, whole) for c in counted]
    total = sum(outputs[symbol] for symbol in main_symbols(twin_of(plan)))
    return [*kernels, CountedKernel("all", total, together(counted), whole)]


def _outputs(plan: Plan, batch: Batch, sizes: Sequence[int]) -> dict[str, int]:
    """The number of outputs of each kernel, by symbol: bags and rows of its features; for the kernels of long bags, the
    long bags of all pooled features."""
    twin = twin_of(plan)
    classes = register_classes(geometry_of(twin))
    outputs = {}
    for symbol, members in zip(main_symbols(twin), classes, strict=True):
        features = [f for g in members for f in g.bucket.features]
        outputs[symbol] = sum(sizes[f.index] if f.column is None else batch.batch for f in features)
    longest = shape_of(twin).long_bag
    lengths = batch.offsets.diff().view(len(plan.layout.features), -1)
    pooled = [f.index for f in plan.layout.features if f.feature.kind.pooled]
    long_bags = int((lengths[pooled] > longest).sum())
    return outputs | dict.fromkeys(long_symbols(twin), long_bags)


def _ids_of_features(plan: Plan, batch: Batch) -> list[int]:
    lengths = batch.offsets.diff().view(len(plan.layout.features), -1)
    return [int(size) for size in lengths.sum(1).tolist()]


def _short(symbol: str, kernel: str) -> str:
    return symbol.removeprefix(kernel).strip("_") or "forward"
