"""The table of what memory instructions cost, as the SIMT executor counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from embforge.cli.common import plain_table
from embforge.codegen.reading.numbers import size

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec
    from embforge.launch.simt.counters import Traffic
    from embforge.verify.counting import CountedKernel

NOTE = (
    "Counted: the warp instructions of the source. Caches and what a GPU's compiler changes are not part of it. "
    "Lanes: how many of 32 are active, over instructions with any. An output is a bag, or a row of pooling 'none'."
)


def count_spec(spec: CollectionSpec, *, arch: str | None, params: Any, workload: str, seed: int) -> dict[str, Any]:
    """The counters of one batch of a workload, run by the spec's kernel with `params` (None: the default ones)."""
    from embforge.codegen.params import CudaParams
    from embforge.codegen.plan import Plan
    from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
    from embforge.tuner.workload.tensors import input_of
    from embforge.tuner.workload.workload import make_batch, parse
    from embforge.verify.cases import draw_tables
    from embforge.verify.counting import count_lookup
    from embforge.verify.probes import shrunk

    spec = spec.by_rows()
    small, law = shrunk(spec, COUNTED_ROWS), parse(workload)
    drawn = make_batch(small, law, seed)
    plan = Plan("forward", "simt", arch or DEFAULT_ARCH, "int64", spec, params or CudaParams())
    kernels = count_lookup(plan, draw_tables(small, seed), input_of(drawn), seed=seed)
    return {"workload": str(law), "arch": plan.arch, "ids": drawn.values.size, "kernels": kernels}


COUNTED_ROWS = 20_000
"""Most rows per table: enough that two lanes of a warp seldom read the same row."""


def counter_table(counted: dict[str, Any]) -> Table:
    """One column per kernel, one line per figure."""
    table = plain_table("", title=f"Counted: {counted['workload']}, {counted['ids']:,} ids, {counted['arch']}")
    for kernel in counted["kernels"]:
        table.add_column(kernel.name, justify="right", no_wrap=True)
    for label, show in FIGURES.items():
        table.add_row(label, *(show(kernel) for kernel in counted["kernels"]))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _of_global_memory(what: str, of: Callable[[CountedKernel], Traffic]) -> dict[str, Callable[[CountedKernel], str]]:
    """The lines about all loads, or all stores, whichever memory they touch."""
    return {
        f"global {what} bytes requested": lambda k: size(of(k).bytes),
        f"global {what} sectors": lambda k: f"{of(k).sectors:,}",
        f"global {what} efficiency": lambda k: _share(of(k).efficiency),
        f"mean active lanes, {what}s": lambda k: _number(of(k).active_lanes),
    }


FIGURES: dict[str, Callable[[CountedKernel], str]] = {
    "outputs": lambda k: f"{k.outputs:,}",
    "row bytes requested": lambda k: size(k.counters.loaded("rows").bytes),
    "row sectors": lambda k: f"{k.counters.loaded('rows').sectors:,}",
    "row load efficiency": lambda k: _share(k.counters.loaded("rows").efficiency),
    "  rows of 32·n bytes only": lambda k: _share(k.counters.rows_of(k.whole_sectors).efficiency),
    "mean active lanes, row loads": lambda k: _number(k.counters.loaded("rows").active_lanes),
    "row loads, no active lane": lambda k: f"{k.counters.loaded('rows').idle:,}",
    "id sectors / output": lambda k: _number(k.per_output("ids")),
    "offset sectors / output": lambda k: _number(k.per_output("offsets")),
    "output store efficiency": lambda k: _share(k.counters.stored("outputs").efficiency),
    **_of_global_memory("load", lambda k: k.counters.all_loads),
    **_of_global_memory("store", lambda k: k.counters.all_stores),
    "shared loads": lambda k: f"{k.counters.shared_loads.instructions:,}",
    "shared bytes loaded": lambda k: size(k.counters.shared_loads.bytes),
    "mean active lanes, shared loads": lambda k: _number(k.counters.shared_loads.active_lanes),
    "bank conflicts": lambda k: f"{k.counters.bank_conflicts:,}",
    "barriers": lambda k: f"{k.counters.barriers:,}",
    "atomics": lambda k: f"{k.counters.atomics:,}",
}
