"""The table of what memory instructions cost, as the SIMT executor counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec
    from embforge.launch.simt.counters import Traffic
    from embforge.verify.counting import CountedKernel

NOTE = (
    "Counted as the source issues warp instructions; caches and what a GPU's compiler makes of it are not known here. "
    "Lanes: active ones of 32, over instructions with any. An output is a bag, or a row of pooling 'none'."
)


def count_spec(spec: CollectionSpec, *, arch: str | None, params: Any, workload: str, seed: int) -> dict[str, Any]:
    """The counters of the spec's default kernel, or of the given fields, for one batch of a workload."""
    import torch

    from embforge.verify.cases import draw_tables
    from embforge.codegen.params import CudaParams
    from embforge.codegen.plan import Plan
    from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
    from embforge.verify.counting import count_lookup
    from embforge.inputs import Batch
    from embforge.verify.probes import shrunk
    from embforge.tuner.workload.workload import make_batch, parse

    small, law = shrunk(spec, COUNTED_ROWS), parse(workload)
    drawn = make_batch(small, law, seed)
    weights = None if drawn.weights is None else torch.from_numpy(drawn.weights)
    batch = Batch(torch.from_numpy(drawn.values), torch.from_numpy(drawn.offsets), weights, drawn.size, None)
    plan = Plan("forward", "simt", arch or DEFAULT_ARCH, "int64", spec, params or CudaParams())
    kernels = count_lookup(plan, draw_tables(small, seed), batch, seed=seed)
    return {"workload": str(law), "arch": plan.arch, "ids": drawn.values.size, "kernels": kernels}


COUNTED_ROWS = 20_000
"""Rows of a table, at most: enough that lanes of a warp seldom ask for the same row."""


def counter_table(counted: dict[str, Any]) -> Table:
    """A column a kernel, a line a figure."""
    from rich import box
    from rich.table import Table

    title = f"Counted: {counted['workload']}, {counted['ids']:,} ids, {counted['arch']}"
    table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for kernel in counted["kernels"]:
        table.add_column(kernel.name, justify="right", no_wrap=True)
    for label, show in FIGURES.items():
        table.add_row(label, *(show(kernel) for kernel in counted["kernels"]))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def _of_global_memory(what: str, of: Callable[[CountedKernel], Traffic]) -> dict[str, Callable[[CountedKernel], str]]:
    """The lines of all loads, or stores, whatever memory they are of."""
    return {
        f"global {what} bytes asked": lambda k: _megabytes(of(k).bytes),
        f"global {what} sectors": lambda k: f"{of(k).sectors:,}",
        f"global {what} efficiency": lambda k: _share(of(k).efficiency),
        f"mean active lanes, {what}s": lambda k: _number(of(k).active_lanes),
    }


FIGURES: dict[str, Callable[[CountedKernel], str]] = {
    "outputs": lambda k: f"{k.outputs:,}",
    "row bytes asked": lambda k: _megabytes(k.counters.loaded("rows").bytes),
    "row sectors": lambda k: f"{k.counters.loaded('rows').sectors:,}",
    "row load efficiency": lambda k: _share(k.counters.loaded("rows").efficiency),
    "  of rows of 32·n bytes": lambda k: _share(k.counters.rows_of(k.whole_sectors).efficiency),
    "mean active lanes, row loads": lambda k: _number(k.counters.loaded("rows").active_lanes),
    "row loads without a lane": lambda k: f"{k.counters.loaded('rows').idle:,}",
    "id sectors / output": lambda k: _number(k.per_output("ids")),
    "offset sectors / output": lambda k: _number(k.per_output("offsets")),
    "output store efficiency": lambda k: _share(k.counters.stored("outputs").efficiency),
    **_of_global_memory("load", lambda k: k.counters.all_loads),
    **_of_global_memory("store", lambda k: k.counters.all_stores),
    "shared loads": lambda k: f"{k.counters.shared_loads.instructions:,}",
    "shared bytes loaded": lambda k: _megabytes(k.counters.shared_loads.bytes),
    "mean active lanes, shared loads": lambda k: _number(k.counters.shared_loads.active_lanes),
    "bank conflicts": lambda k: f"{k.counters.bank_conflicts:,}",
    "barriers": lambda k: f"{k.counters.barriers:,}",
    "atomics": lambda k: f"{k.counters.atomics:,}",
}
