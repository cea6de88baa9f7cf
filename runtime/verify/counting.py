"""One lookup counted by the SIMT executor: what its memory instructions cost, kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embforge.arguments import sequence_elements
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.geometry import geometry_of, register_classes
from embforge.codegen.targets.cuda.launch import long_symbols, main_symbols, shape_of
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import metadata_of
from embforge.launch.simt.counters import SECTOR, KernelCounters, together
from embforge.launch.simt.forward import SimtForward, SimtOptions


@dataclass(frozen=True)
class CountedKernel:
    """A kernel's counters beside what it made: `outputs` counts bags, and rows of features that are not pooled."""

    name: str
    """Short: forward, wide, long, merge, or all of them together."""
    outputs: int
    counters: KernelCounters
    whole_sectors: tuple[str, ...]
    """Tables whose rows are a multiple of 32 bytes, so that no row needs a part of a sector."""

    def per_output(self, kind: str) -> float | None:
        """Sectors loaded of a kind of memory for each output."""
        return self.counters.loaded(kind).sectors / self.outputs if self.outputs else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
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
    """The counters of each kernel that the lookup launches, and at the end of all together.

    `plan` is of target simt. Raises what a call of that backend raises.
    """
    kernel = kernel_of(Program(plan).text)
    assert isinstance(kernel, SimtForward)
    plan = kernel.plan  # which knows the symbols of its binary
    sizes = _ids_of_features(plan, batch)
    rows = [sizes[f.index] for f in plan.layout.sequence_features]
    elements = sequence_elements(plan.layout, rows)
    metadata = metadata_of(tables, "error")
    counted = kernel.run(metadata, tables, batch, elements, "error", SimtOptions(seed, count=True)).counters
    made = _outputs(plan, batch, sizes)
    whole = tuple(t.table.name for t in plan.layout.tables if t.row_bytes % SECTOR == 0)
    found = [CountedKernel(_short(c.kernel, plan.symbol), made[c.kernel], c, whole) for c in counted]
    everything = sum(made[symbol] for symbol in main_symbols(twin_of(plan)))
    return [*found, CountedKernel("all", everything, together(counted), whole)]


def _outputs(plan: Plan, batch: Batch, sizes: Sequence[int]) -> dict[str, int]:
    """What each kernel makes: bags and rows of its features, and of all pooled ones the long bags."""
    twin = twin_of(plan)
    classes = register_classes(geometry_of(twin))
    made = {}
    for symbol, members in zip(main_symbols(twin), classes, strict=True):
        owned = [f for g in members for f in g.bucket.features]
        made[symbol] = sum(sizes[f.index] if f.column is None else batch.batch for f in owned)
    longest = shape_of(twin).long_bag
    lengths = batch.offsets.diff().view(len(plan.layout.features), -1)
    pooled = [f.index for f in plan.layout.features if f.feature.kind.pooled]
    long_bags = int((lengths[pooled] > longest).sum())
    return made | dict.fromkeys(long_symbols(twin), long_bags)


def _ids_of_features(plan: Plan, batch: Batch) -> list[int]:
    lengths = batch.offsets.diff().view(len(plan.layout.features), -1)
    return [int(size) for size in lengths.sum(1).tolist()]


def _short(symbol: str, kernel: str) -> str:
    return symbol.removeprefix(kernel).strip("_") or "forward"
