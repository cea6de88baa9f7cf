"""Holds a backend against the reference, bit for bit, and against torch.nn.EmbeddingBag, within rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from embforge.against_torch import differences_from_torch
from embforge.cases import Case, Drawn, draw_batch, draw_tables
from embforge.codegen.build import build_many
from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import ToolchainError
from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.params import PARAMS, Params
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, TableSpec
from embforge.collection import arch_of
from embforge.inputs import Batch
from embforge.launch import reference
from embforge.launch.kernels import Kernel, Program, kernel_of
from embforge.launch.metadata import metadata_of
from embforge.ops import sequence_elements
from embforge.pairwise import covering

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many steps of it are done, and of how many."""
Result = tuple[Tensor, Tensor]
"""Pooled `[B, output_width]`, and the flat sequence."""

SMALL_ROWS = 1000
"""Rows of the tables that hold special numbers. A kernel learns a table's size when it is called."""


@dataclass(frozen=True)
class VerifyRow:
    """One line of the report."""

    check: str
    cases: int
    max_abs_error: float
    """Largest difference seen; 0 where bits are compared and all are equal."""
    passed: bool
    detail: str = ""
    """Of the first failure: plan, threads, feature, place, what was expected and what came."""


@dataclass(frozen=True)
class Probe:
    """A batch, the tables it is looked up in, and what the reference makes of it."""

    case: Case
    special: bool
    drawn: Drawn
    tables: tuple[Tensor, ...]
    expected: Result

    def __str__(self) -> str:
        return str(self.case) + (", special numbers" if self.special else "")

    def fits(self, id_dtype: str) -> bool:
        """Whether its ids can be said in that dtype: bad int64 ids need int64."""
        return id_dtype == "int64" or self.case.id_dtype == "int32" or not self.case.bad_ids


def verify(
    spec: CollectionSpec,
    *,
    on: str = "cpu",
    params: Sequence[Params] | None = None,
    batch_sizes: Sequence[int] = (1, 37, 256),
    seed: int = 0,
    threads: Sequence[int] = (1, 2),
    progress: Progress | None = None,
) -> list[VerifyRow]:
    """Runs backend `on` over batches that look for trouble, with every thread count, and compares.

    `params`: the plan fields to run, with both id dtypes; None runs the default and a set in which any two choices
    of any two fields meet. A difference is a row that did not pass. Raises only if a kernel cannot be built, and
    `ToolchainError` if `on` is "cuda" and there is none.
    """
    if on == "cuda" and not torch.cuda.is_available():
        raise ToolchainError(
            "verify --on cuda needs a CUDA device and a torch built for it; none is here; use --on cpu, "
            "or `embforge gen` to compile for GPUs without one"
        )
    tell = progress or (lambda what, done, total: None)
    device = torch.device("cuda" if on == "cuda" else "cpu")
    plans = plans_to_verify(spec, on, arch_of(on, device), params)
    build_all(plans, tell)
    probes = draw_probes(spec, batch_sizes, seed, device, tell)
    tallies = [_Tally(layout_of(spec), probe) for probe in probes]
    for done, plan in enumerate(plans):
        tell("running kernels", done, len(plans))
        kernel = kernel_of(Program(plan).text)
        for tally in tallies:
            if tally.probe.fits(plan.id_dtype):
                for count in threads:
                    with torch_threads(count):
                        tally.add(plan, count, run(kernel, tally.probe))
    tell("running kernels", len(plans), len(plans))
    return [tally.row() for tally in tallies] + _torch_rows(kernel_of(Program(plans[0]).text), probes)


def plans_to_verify(spec: CollectionSpec, target: str, arch: str, params: Sequence[Params] | None) -> list[Plan]:
    """The given params with both id dtypes, or the default ones and a pairwise covering set of all fields."""
    kind = PARAMS[target]
    given = [kind()] if params is None else params
    chosen = [(id_dtype, p) for p in given for id_dtype in reversed(ID_DTYPES)]
    if params is None:
        choices = {f.name: f.metadata["choices"] for f in fields(kind)} | {"id_dtype": ID_DTYPES}
        for row in covering(choices):
            id_dtype = row.pop("id_dtype")
            chosen.append((id_dtype, kind(**row)))
    return [Plan("forward", target, arch, id_dtype, spec, p) for id_dtype, p in dict.fromkeys(chosen)]


def build_all(plans: Sequence[Plan], tell: Progress) -> None:
    """Compiles the plans in parallel, if their target compiles at all."""
    if plans[0].target == "reference":
        return
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        tell("building kernels", done, len(plans))

    tell("building kernels", 0, len(plans))
    build_many(plans, progress=count)


def draw_probes(
    spec: CollectionSpec, batch_sizes: Sequence[int], seed: int, device: torch.device, tell: Progress
) -> list[Probe]:
    """The batches of all cases, each with the reference's answer."""
    largest = max(batch_sizes)
    cases = [
        Case(0, "none"),
        Case(largest, "none"),
        *(Case(size, ids="zipf" if index % 2 else "uniform") for index, size in enumerate(batch_sizes)),
        Case(largest, "one", weights="absent"),
        Case(min(largest, 48), "edges", weights="special"),
        Case(min(largest, 8), "long"),
        Case(min(largest, 64), ids="same"),
        Case(largest, bad_ids=True, id_dtype="int32"),
        Case(min(largest, 64), bad_ids=True),
    ]
    small = replace(spec, tables=tuple(_shrunk(spec, table) for table in spec.tables))
    on_special = [
        Case(min(largest, 64)),
        Case(min(largest, 16), "edges", weights="special", bad_ids=True, id_dtype="int32"),
    ]
    probes: list[Probe] = []
    for part, special, wanted in ((spec, False, cases), (small, True, on_special)):
        tell("drawing tables", int(special), 2)
        tables = draw_tables(part, seed, special, device)
        for case in wanted:
            tell("asking the reference", len(probes), len(cases) + len(on_special))
            drawn = draw_batch(part, case, seed + len(probes), device)
            expected = reference.lookup(part, *drawn, tables, bounds_check="zero" if case.bad_ids else "error")
            probes.append(Probe(case, special, drawn, tables, expected))
    return probes


def run(kernel: Kernel, probe: Probe) -> Result:
    """The kernel's answer to a probe."""
    plan, dtype = kernel.plan, getattr(torch, kernel.plan.id_dtype)
    values, offsets, weights = probe.drawn
    batch = Batch(values.to(dtype), offsets.to(dtype), weights, probe.case.batch, None)
    bounds_check = "zero" if probe.case.bad_ids else "error"
    elements = sequence_elements(plan.layout, _sequence_rows(plan.layout, batch))
    pooled, sequence = kernel(metadata_of(probe.tables, bounds_check), probe.tables, batch, elements, bounds_check)
    return pooled, pooled.new_empty(0) if sequence is None else sequence


def _sequence_rows(layout: CollectionLayout, batch: Batch) -> list[int]:
    borders = batch.offsets[:: batch.batch].tolist() if batch.batch else [0] * (len(layout.features) + 1)
    return [borders[f.index + 1] - borders[f.index] for f in layout.sequence_features]


def _shrunk(spec: CollectionSpec, table: TableSpec) -> TableSpec:
    """The table with few rows, its features' padding ids among them."""
    padding = [f.padding_idx for f in spec.features if f.table == table.name and f.padding_idx is not None]
    return replace(table, num_embeddings=min(table.num_embeddings, max([SMALL_ROWS - 1, *padding]) + 1))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's own thread count, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Tally:
    """Counts a probe's runs and keeps the first that differs."""

    def __init__(self, layout: CollectionLayout, probe: Probe) -> None:
        self.layout = layout
        self.probe = probe
        self.cases = 0
        self.error = 0.0
        self.detail = ""

    def add(self, plan: Plan, threads: int, got: Result) -> None:
        self.cases += 1
        for name, want, have in zip(("pooled", "sequence"), self.probe.expected, got, strict=True):
            place = first_difference(want, have)
            if place is None:
                continue
            self.error = max(self.error, _largest_difference(want, have))
            if not self.detail:
                where = self._where(name, place)
                came = f"{want.flatten()[place].item()!r}, got {have.flatten()[place].item()!r}"
                self.detail = f"{where}: expected {came} ({plan.uri}, {plan.params}, {threads} threads)"

    def _where(self, name: str, place: int) -> str:
        if name == "sequence":
            return f"number {place} of the sequence output"
        sample, column = divmod(place, self.layout.output_width)
        owner = next(f for f in self.layout.features if f.column is not None and column < f.column + f.width)
        return f"feature {owner.feature.name!r}, sample {sample}, column {column - (owner.column or 0)}"

    def row(self) -> VerifyRow:
        return VerifyRow(f"reference bits: {self.probe}", self.cases, self.error, not self.detail, self.detail)


def first_difference(want: Tensor, have: Tensor) -> int | None:
    """Where two results first differ in a bit; one NaN is as good as another."""
    if want.shape != have.shape or want.dtype != have.dtype:
        raise AssertionError(f"expected {want.dtype} {tuple(want.shape)}, got {have.dtype} {tuple(have.shape)}")
    bits = torch.int32 if want.element_size() == 4 else torch.int16
    if torch.equal(want.view(bits), have.view(bits)):
        return None
    differs = ((want.view(bits) != have.view(bits)) & ~(want.isnan() & have.isnan())).flatten()
    return int(differs.int().argmax()) if bool(differs.any()) else None


def _largest_difference(want: Tensor, have: Tensor) -> float:
    """Infinite where a number stands against a NaN or an infinity."""
    apart = (want.double() - have.double()).abs()
    apart = apart.masked_fill(((want == have) | (want.isnan() & have.isnan())).to(apart.device), 0.0)
    return float(apart.nan_to_num(nan=math.inf).max())


def _torch_rows(kernel: Kernel, probes: Sequence[Probe]) -> list[VerifyRow]:
    """Only what torch has: no absent ids, at least one sample; and no numbers that overflow."""
    rows: dict[str, VerifyRow] = {}
    for probe in probes:
        if probe.case.bad_ids or probe.special or probe.case.weights == "special" or not probe.case.batch:
            continue
        for found in differences_from_torch(kernel.plan.spec, probe.drawn, probe.tables, run(kernel, probe)):
            row = rows.get(found.peer, VerifyRow(found.peer, 0, 0.0, True))
            detail = row.detail or ("" if found.within_rounding else f"feature {found.feature!r}: {probe}")
            rows[found.peer] = VerifyRow(
                found.peer, row.cases + 1, max(row.max_abs_error, found.error), not detail, detail
            )
    return list(rows.values())
