"""Compares the lookups of a backend with the reference, bit for bit, and with torch.nn.EmbeddingBag, within
rounding."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.backends import arch_of, device_of
from embforge.codegen.build import build_many, source_of
from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import EmbforgeError, ToolchainError
from embforge.codegen.params import CudaParams, Params, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.codegen.targets.simt.image import device_code
from embforge.device_facts import gpu_facts
from embforge.launch.kernels import Kernel, Program, kernel_of
from embforge.launch.simt.forward import SimtForward, SimtOptions
from embforge.result_elements import pooled_location, sequence_location
from embforge.verify.against_torch import differences_from_torch
from embforge.verify.pairwise import covering
from embforge.verify.probes import Probe, Progress, Result, as_result, call_of, few_probes_of, probes_of, run

SCHEDULES = 3
"""The number of schedules, each with its own seed, under which the default plan runs on simt. Every other plan runs
under one schedule, with a seed of its own."""
DEFAULT_PARAMS = (CudaParams(),)
MANY_PLANS = 1000
"""The distance between the seeds of the default plan's schedules. It is more than the number of plans."""


@dataclass(frozen=True)
class VerifyRow:
    """One line of the report."""

    check: str
    cases: int
    max_abs_error: float
    """The largest difference; 0 if bits are compared and all are equal."""
    passed: bool
    detail: str = ""
    """The first failure: plan, threads or schedule, feature, position, what was expected and what the kernel
    returned."""
    not_run: int = 0
    """The number of runs that were left out because the device had stopped working. If all were, the row did not
    pass."""


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, with which results."""

    on: str
    arch: str
    plans: int
    """The number of kernel plans that ran, or should have run when the device stopped working."""
    left_out: int
    """The number of plans that differ from another plan only in what the backend replaces, and so did not run."""
    rows: tuple[VerifyRow, ...]
    device: dict[str, Any] | None = None
    """Facts about the GPU, if a GPU was checked."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def _no_progress(what: str, done: int, total: int) -> None:
    """Ignores progress, for callers that do not show it."""


class Way(NamedTuple):
    """A way to run a kernel, such as a number of threads. No way may change a bit of the results."""

    label: str
    run: Callable[[Kernel, Probe], Result]


def verify(
    spec: CollectionSpec,
    *,
    on: str = "cpu",
    arch: str | None = None,
    params: Sequence[Params] | None = None,
    batch_sizes: Sequence[int] = (1, 37, 256),
    seed: int = 0,
    threads: Sequence[int] = (1, 2),
    progress: Progress | None = None,
) -> VerifyReport:
    """Runs lookups of difficult batches on the backend `on`, with every thread count, and compares their results.

    Ids are rows in these batches; `remap_rows` checks whether a backend turns ids into the right rows.

    `arch`: the architecture to generate code for; None is this machine's. `params`: the plan fields to run, with both
    id dtypes; None runs the default and a set in which any two choices of any two fields occur together. On simt,
    batches are small and kernels run under several schedules, whatever `batch_sizes` and `threads` are; on cuda
    `threads` is ignored.

    The row of a check does not pass if results differ, or if running a kernel raises an error: an error of the driver
    or of torch, one about the batch, or one of the SIMT executor. If an error has stopped a GPU, nothing else runs on
    it, and the remaining runs are counted as not run. `verify` itself raises only before a kernel runs: if a kernel
    cannot be built, if the driver is too old for it, if tables do not fit into memory, and `ToolchainError` if `on` is
    "cuda" and there is no GPU.
    """
    target = target_named(on)
    if target.needs_gpu and not torch.cuda.is_available():
        raise ToolchainError(
            "verify --on cuda needs a CUDA device and a torch built for it; none is here; use --on simt to execute the "
            "CUDA kernels on the CPU, --on cpu, or `embforge gen` to compile for GPUs without one"
        )
    spec = spec.by_rows()
    report_progress = progress or _no_progress
    device = device_of(on)
    facts = gpu_facts(device) if target.needs_gpu else None  # read first, because a GPU that has stopped has no facts
    arch = arch or arch_of(on, device)
    all_plans = plans_to_verify(spec, on, arch, params)
    plans = distinct(all_plans) if target.emulates else all_plans
    build_all(plans, report_progress)
    if target.emulates:
        probes = few_probes_of(spec, seed, report_progress)
        tallies = check_on_simt(plans, probes, seed, params, workers=os.cpu_count() or 1, progress=report_progress)
    else:
        probes = probes_of(spec, batch_sizes, seed, device, report_progress)
        ways = [_with_gpu_errors()] if target.needs_gpu else [_with_threads(count) for count in threads]
        tallies = check_plans([KernelCheck(plan, probes, ways) for plan in plans], progress=report_progress)
    rows = [*(tally.row() for tally in tallies), *_torch_rows(spec, tallies)]
    return VerifyReport(on, arch, len(plans), len(all_plans) - len(plans), tuple(rows), facts)


def plans_to_verify(spec: CollectionSpec, target: str, arch: str, params: Sequence[Params] | None) -> list[Plan]:
    """The plans with these params and both id dtypes. None means the default params and a pairwise covering set of all
    fields."""
    kind = params_type(target)
    with_both_dtypes = [kind()] if params is None else params
    chosen = [(id_dtype, p) for p in with_both_dtypes for id_dtype in reversed(ID_DTYPES)]
    if params is None:
        choices = {f.name: f.metadata["covered"] for f in fields(kind)} | {"id_dtype": ID_DTYPES}
        for row in covering(choices):
            id_dtype = row.pop("id_dtype")
            chosen.append((id_dtype, kind(**row)))
    return [Plan("forward", target, arch, id_dtype, spec, p) for id_dtype, p in dict.fromkeys(chosen)]


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those for which simt would run the same code as for an earlier plan."""
    first: dict[str, Plan] = {}
    for plan in plans:
        first.setdefault(device_code(source_of(plan)).replace(plan.symbol, ""), plan)
    return [*first.values()]


def build_all(plans: Sequence[Plan], progress: Progress) -> None:
    """Compiles the plans in parallel, if code is generated for their target."""
    if not target_named(plans[0].target).is_generated:
        return
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        progress("building kernels", done, len(plans))

    progress("building kernels", 0, len(plans))
    build_many(plans, progress=count)


class KernelCheck(NamedTuple):
    """A kernel's plan, the probes on which the kernel runs, and the ways in which it runs."""

    plan: Plan
    probes: Sequence[Probe]
    ways: Sequence[Way]

    @property
    def fitting_probes(self) -> list[Probe]:
        """The probes whose ids fit the id dtype of the plan."""
        return [probe for probe in self.probes if probe.fits(self.plan.id_dtype)]


def check_on_simt(
    plans: Sequence[Plan],
    probes: Sequence[Probe],
    seed: int,
    params: Sequence[Params] | None = None,
    *,
    workers: int = 1,
    progress: Progress = _no_progress,
) -> list[Tally]:
    """Checks plans on simt. Plans with these params (None: the default) run on all probes under several schedules;
    other plans run on few probes under one schedule."""
    checks, thorough = [], DEFAULT_PARAMS if params is None else params
    for number, plan in enumerate(plans, start=seed * len(plans)):
        if plan.params in thorough:
            checks.append(KernelCheck(plan, probes, [_with_seed(number + i * MANY_PLANS) for i in range(SCHEDULES)]))
        else:
            checks.append(KernelCheck(plan, [probe for probe in probes if probe.for_all], [_with_seed(number)]))
    return check_plans(checks, workers=workers, progress=progress)


def check_plans(checks: Sequence[KernelCheck], *, workers: int = 1, progress: Progress = _no_progress) -> list[Tally]:
    """Runs the checks, building kernels that are not built yet, and counts the results of each probe.

    With several workers, plans run at the same time, which only a backend without a thread pool of its own allows. Ends
    early if a device stops working.
    """
    planned = Counter(id(probe) for check in checks for probe in check.fitting_probes for _ in check.ways)
    tallies = {id(probe): Tally(probe, planned[id(probe)]) for check in checks for probe in check.fitting_probes}

    def answers_to(check: KernelCheck) -> Iterator[tuple[Probe, Way, Answer]]:
        kernel = kernel_of(Program(check.plan).text)
        return ((probe, way, _answer(kernel, probe, way)) for probe in check.fitting_probes for way in check.ways)

    progress("running kernels", 0, len(checks))
    with ThreadPoolExecutor(workers) as pool:
        # A single worker is the calling thread, to which thread counts and a GPU's context belong. It compares each
        # answer before it runs the next probe, because a GPU that stops loses its results.
        all_answers = pool.map(lambda check: [*answers_to(check)], checks) if workers > 1 else map(answers_to, checks)
        for number, answers in enumerate(all_answers):
            for probe, way, answer in answers:
                tallies[id(probe)].add(checks[number].plan, way, answer)
                if isinstance(answer, DeviceLostError):
                    return [*tallies.values()]
            progress("running kernels", number + 1, len(checks))
    return [*tallies.values()]


class DeviceLostError(RuntimeError):
    """An error after which this process can no longer use a device. Its message is that of the original error."""


FAILURES = (RuntimeError, IndexError, ValueError)
"""What a run may raise: errors of torch and the driver, `KernelBugError`, and a kernel's errors about a batch."""
Answer = Result | Exception
"""What a run returned or raised."""


def _answer(kernel: Kernel, probe: Probe, way: Way) -> Answer:
    try:
        return way.run(kernel, probe)
    except FAILURES as error:
        return error


def _with_gpu_errors() -> Way:
    """Runs a kernel on a GPU and waits for the device, because only then are all its errors raised."""

    def answer(kernel: Kernel, probe: Probe) -> Result:
        try:
            result = run(kernel, probe)
            torch.cuda.synchronize()
            kernel.check()
        except FAILURES as error:
            if _gpu_works():
                raise
            raise DeviceLostError(_message(error)) from error
        return result

    return Way(f"device {torch.cuda.current_device()}", answer)


def _gpu_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _message(error: Exception) -> str:
    """The text of an error. Only errors of other libraries need their class to be understood."""
    return str(error) if isinstance(error, EmbforgeError | DeviceLostError) else f"{type(error).__name__}: {error}"


def _with_seed(seed: int) -> Way:
    def answer(kernel: Kernel, probe: Probe) -> Result:
        assert isinstance(kernel, SimtForward)
        return as_result(*kernel.run(*call_of(kernel.plan, probe), SimtOptions(seed))[:2])

    return Way(f"schedule {seed}", answer)


def _with_threads(count: int) -> Way:
    def answer(kernel: Kernel, probe: Probe) -> Result:
        with torch_threads(count):
            return run(kernel, probe)

    return Way(f"{count} threads", answer)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads within a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Tally:
    """Counts the runs of a probe, and keeps the first result and a description of the first failure."""

    def __init__(self, probe: Probe, planned: int) -> None:
        self.probe = probe
        self.planned = planned
        self.first: Result | None = None
        self.cases = 0
        self.error = 0.0
        self.detail = ""
        self.device_lost = False

    def add(self, plan: Plan, way: Way, got: Answer) -> None:
        self.cases += 1
        run_as = f"({plan.uri}, {plan.params}, {way.label})"
        if isinstance(got, Exception):
            self.error = math.inf
            self.detail = self.detail or f"{_message(got)}\n  {run_as}"
            self.device_lost = isinstance(got, DeviceLostError)
            return
        self.first = self.first or got
        for name, want, have in zip(("pooled", "sequence"), self.probe.expected, got, strict=True):
            place = first_difference(want, have)
            if place is None:
                continue
            self.error = max(self.error, _largest_difference(want, have))
            if not self.detail:
                numbers = f"expected {want.flatten()[place].item()!r}, got {have.flatten()[place].item()!r}"
                self.detail = f"{self._where(plan, name, place)}: {numbers} {run_as}"

    def _where(self, plan: Plan, name: str, place: int) -> str:
        if name == "pooled":
            return pooled_location(plan.layout, place)
        return sequence_location(plan.layout, self.probe.drawn.offsets, self.probe.case.batch, place)

    def row(self) -> VerifyRow:
        passed = self.cases > 0 and not self.detail
        not_run = self.planned - self.cases
        return VerifyRow(f"reference bits: {self.probe}", self.cases, self.error, passed, self.detail, not_run)


def first_difference(want: Tensor, have: Tensor) -> int | None:
    """The index of the first number in which two results differ in a bit, or None. All NaNs count as equal."""
    if want.shape != have.shape or want.dtype != have.dtype:
        raise AssertionError(f"expected {want.dtype} {tuple(want.shape)}, got {have.dtype} {tuple(have.shape)}")
    bits = torch.int32 if want.element_size() == 4 else torch.int16
    if torch.equal(want.view(bits), have.view(bits)):
        return None
    differs = ((want.view(bits) != have.view(bits)) & ~(want.isnan() & have.isnan())).flatten()
    return int(differs.int().argmax()) if bool(differs.any()) else None


def _largest_difference(want: Tensor, have: Tensor) -> float:
    """The largest absolute difference. It is infinite if only one of two numbers is NaN or infinite."""
    apart = (want.double() - have.double()).abs()
    apart = apart.masked_fill(((want == have) | (want.isnan() & have.isnan())).to(apart.device), 0.0)
    return float(apart.nan_to_num(nan=math.inf).max())


def _torch_rows(spec: CollectionSpec, tallies: Sequence[Tally]) -> list[VerifyRow]:
    """Compares the first result of each probe with torch's, except for probes that torch cannot compute: those with
    absent ids, without samples, or with numbers that overflow."""
    if any(tally.device_lost for tally in tallies):
        return [VerifyRow("torch.nn.EmbeddingBag", 0, 0.0, passed=False, not_run=1)]
    rows: dict[str, VerifyRow] = {}
    for tally in tallies:
        probe = tally.probe
        if probe.case.bad_ids or probe.special or probe.case.weights == "special" or not probe.case.batch:
            continue
        if tally.first is None:
            continue
        for difference in differences_from_torch(spec, probe.drawn, probe.tables, tally.first):
            row = rows.get(difference.peer, VerifyRow(difference.peer, 0, 0.0, True))
            detail = row.detail or ("" if difference.within_rounding else f"feature {difference.feature!r}: {probe}")
            error = max(row.max_abs_error, difference.error)
            rows[difference.peer] = VerifyRow(difference.peer, row.cases + 1, error, not detail, detail)
    return list(rows.values())
