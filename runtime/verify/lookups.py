"""Holds a backend against the reference, bit for bit, and against torch.nn.EmbeddingBag, within rounding."""

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
from embforge.device import gpu_facts
from embforge.launch.kernels import Kernel, Program, kernel_of
from embforge.launch.simt.forward import SimtForward, SimtOptions
from embforge.places import pooled_place, sequence_place
from embforge.verify.against_torch import differences_from_torch
from embforge.verify.pairwise import covering
from embforge.verify.probes import Probe, Progress, Result, call_of, few_probes_of, probes_of, run, whole

SCHEDULES = 3
"""Seeds that the default plan is run with on simt. Every other plan has one, each another one."""
DEFAULT_PARAMS = (CudaParams(),)
MANY_PLANS = 1000
"""Between the seeds of a default plan's schedules: more than there are plans."""


@dataclass(frozen=True)
class VerifyRow:
    """One line of the report."""

    check: str
    cases: int
    max_abs_error: float
    """Largest difference seen; 0 where bits are compared and all are equal."""
    passed: bool
    detail: str = ""
    """Of the first failure: plan, threads or schedule, feature, place, what was expected and what came."""
    not_run: int = 0
    """Runs that were left out because the device had stopped working; without any other, the row did not pass."""


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and how it went."""

    on: str
    arch: str
    plans: int
    """Plans that ran, or were to run when the device stopped working."""
    left_out: int
    """Plans of the covering set whose text is that of another but for what the backend replaces."""
    rows: tuple[VerifyRow, ...]
    device: dict[str, Any] | None = None
    """Facts about the GPU, if it is one that was checked."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def _tell_nobody(what: str, done: int, total: int) -> None:
    """For those who do not watch."""


class Way(NamedTuple):
    """One of the ways to run a kernel, none of which may change a bit."""

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
    """Runs backend `on` over batches that look for trouble, with every thread count, and compares.

    Lookups begin with rows; whether ids become the right rows is for `remap_rows` to say.

    `arch`: what to generate for, if not for this machine. `params`: the plan fields to run, with both id dtypes; None
    runs the default and a set in which any two choices of any two fields meet. On simt, schedules stand in for threads
    and batches are small, whatever `batch_sizes` and `threads` say; on cuda `threads` means nothing.

    A difference, and any error of a kernel's run (the driver's, torch's, a batch it calls wrong, what the SIMT executor
    finds), is a row that did not pass. A GPU that an error has stopped is left alone: what was still to do is counted
    as not run. Raises only for what comes before a kernel runs: one that cannot be built or that the driver is too old
    for, tables that do not fit into memory, and `ToolchainError` if `on` is "cuda" and there is none.
    """
    target = target_named(on)
    if target.needs_gpu and not torch.cuda.is_available():
        raise ToolchainError(
            "verify --on cuda needs a CUDA device and a torch built for it; none is here; use --on simt to execute the "
            "CUDA kernels on the CPU, --on cpu, or `embforge gen` to compile for GPUs without one"
        )
    spec = spec.by_rows()
    tell = progress or _tell_nobody
    device = device_of(on)
    facts = gpu_facts(device) if target.needs_gpu else None  # now: a GPU that has stopped tells nothing
    arch = arch or arch_of(on, device)
    wanted = plans_to_verify(spec, on, arch, params)
    plans = distinct(wanted) if target.emulates else wanted
    build_all(plans, tell)
    if target.emulates:
        tallies = check_on_simt(
            plans, few_probes_of(spec, seed, tell), seed, params, workers=os.cpu_count() or 1, tell=tell
        )
    else:
        probes = probes_of(spec, batch_sizes, seed, device, tell)
        ways = [_waited_for()] if target.needs_gpu else [_with_threads(count) for count in threads]
        tallies = check_plans([Trial(plan, probes, ways) for plan in plans], tell=tell)
    rows = [*(tally.row() for tally in tallies), *_torch_rows(spec, tallies)]
    return VerifyReport(on, arch, len(plans), len(wanted) - len(plans), tuple(rows), facts)


def plans_to_verify(spec: CollectionSpec, target: str, arch: str, params: Sequence[Params] | None) -> list[Plan]:
    """The given params with both id dtypes, or the default ones and a pairwise covering set of all fields."""
    kind = params_type(target)
    given = [kind()] if params is None else params
    chosen = [(id_dtype, p) for p in given for id_dtype in reversed(ID_DTYPES)]
    if params is None:
        choices = {f.name: f.metadata["covered"] for f in fields(kind)} | {"id_dtype": ID_DTYPES}
        for row in covering(choices):
            id_dtype = row.pop("id_dtype")
            chosen.append((id_dtype, kind(**row)))
    return [Plan("forward", target, arch, id_dtype, spec, p) for id_dtype, p in dict.fromkeys(chosen)]


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans that differ in the code that simt runs; of several with the same code, the first."""
    first: dict[str, Plan] = {}
    for plan in plans:
        first.setdefault(device_code(source_of(plan)).replace(plan.symbol, ""), plan)
    return [*first.values()]


def build_all(plans: Sequence[Plan], tell: Progress) -> None:
    """Compiles the plans in parallel, if their target compiles at all."""
    if not target_named(plans[0].target).is_generated:
        return
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        tell("building kernels", done, len(plans))

    tell("building kernels", 0, len(plans))
    build_many(plans, progress=count)


class Trial(NamedTuple):
    """A plan, the probes that are put to its kernel, and the ways in which it is run."""

    plan: Plan
    probes: Sequence[Probe]
    ways: Sequence[Way]

    @property
    def asked(self) -> list[Probe]:
        """The probes that can be put to the kernel."""
        return [probe for probe in self.probes if probe.fits(self.plan.id_dtype)]


def check_on_simt(
    plans: Sequence[Plan],
    probes: Sequence[Probe],
    seed: int,
    params: Sequence[Params] | None = None,
    *,
    workers: int = 1,
    tell: Progress = _tell_nobody,
) -> list[Tally]:
    """Plans with these params (the default ones) get all probes and several schedules; others few probes and one."""
    trials, thorough = [], DEFAULT_PARAMS if params is None else params
    for number, plan in enumerate(plans, start=seed * len(plans)):
        if plan.params in thorough:
            trials.append(Trial(plan, probes, [_with_seed(number + i * MANY_PLANS) for i in range(SCHEDULES)]))
        else:
            trials.append(Trial(plan, [probe for probe in probes if probe.for_all], [_with_seed(number)]))
    return check_plans(trials, workers=workers, tell=tell)


def check_plans(trials: Sequence[Trial], *, workers: int = 1, tell: Progress = _tell_nobody) -> list[Tally]:
    """Runs the trials, building kernels where that was not done yet, and counts how each probe went.

    Several workers run plans at once, which only a backend without a thread pool of its own allows. Ends early if a
    device stops working.
    """
    planned = Counter(id(probe) for trial in trials for probe in trial.asked for _ in trial.ways)
    tallies = {id(probe): Tally(probe, planned[id(probe)]) for trial in trials for probe in trial.asked}

    def ask(trial: Trial) -> Iterator[tuple[Probe, Way, Answer]]:
        kernel = kernel_of(Program(trial.plan).text)
        return ((probe, way, _answer(kernel, probe, way)) for probe in trial.asked for way in trial.ways)

    tell("running kernels", 0, len(trials))
    with ThreadPoolExecutor(workers) as pool:
        # One worker is the caller's own thread: thread counts and a GPU's context belong to it. It compares each answer
        # before it asks for the next, because results on a GPU that stops are lost.
        answered = pool.map(lambda trial: [*ask(trial)], trials) if workers > 1 else map(ask, trials)
        for number, answers in enumerate(answered):
            for probe, way, answer in answers:
                tallies[id(probe)].add(trials[number].plan, way, answer)
                if isinstance(answer, DeviceLostError):
                    return [*tallies.values()]
            tell("running kernels", number + 1, len(trials))
    return [*tallies.values()]


class DeviceLostError(RuntimeError):
    """An error after which a device does nothing more for this process. The message is that of the error."""


FAILURES = (RuntimeError, IndexError, ValueError)
"""What a run may raise: errors of torch and the driver, a `KernelBugError`, and what kernels say of a wrong batch."""
Answer = Result | Exception


def _answer(kernel: Kernel, probe: Probe, way: Way) -> Answer:
    try:
        return way.run(kernel, probe)
    except FAILURES as error:
        return error


def _waited_for() -> Way:
    """On a GPU: with all that went wrong, which it tells only to those who wait."""

    def answer(kernel: Kernel, probe: Probe) -> Result:
        try:
            result = run(kernel, probe)
            torch.cuda.synchronize()
            kernel.check()
        except FAILURES as error:
            if _gpu_works():
                raise
            raise DeviceLostError(_told(error)) from error
        return result

    return Way(f"device {torch.cuda.current_device()}", answer)


def _gpu_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _told(error: Exception) -> str:
    """Our own errors are sentences; others need their kind to be understood."""
    return str(error) if isinstance(error, EmbforgeError | DeviceLostError) else f"{type(error).__name__}: {error}"


def _with_seed(seed: int) -> Way:
    def answer(kernel: Kernel, probe: Probe) -> Result:
        assert isinstance(kernel, SimtForward)
        return whole(*kernel.run(*call_of(kernel.plan, probe), SimtOptions(seed))[:2])

    return Way(f"schedule {seed}", answer)


def _with_threads(count: int) -> Way:
    def answer(kernel: Kernel, probe: Probe) -> Result:
        with torch_threads(count):
            return run(kernel, probe)

    return Way(f"{count} threads", answer)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch's own thread count, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Tally:
    """Counts a probe's runs, and keeps the first answer and the first that differs."""

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
            self.detail = self.detail or f"{_told(got)}\n  {run_as}"
            self.device_lost = isinstance(got, DeviceLostError)
            return
        self.first = self.first or got
        for name, want, have in zip(("pooled", "sequence"), self.probe.expected, got, strict=True):
            place = first_difference(want, have)
            if place is None:
                continue
            self.error = max(self.error, _largest_difference(want, have))
            if not self.detail:
                came = f"{want.flatten()[place].item()!r}, got {have.flatten()[place].item()!r}"
                self.detail = f"{self._where(plan, name, place)}: expected {came} {run_as}"

    def _where(self, plan: Plan, name: str, place: int) -> str:
        if name == "pooled":
            return pooled_place(plan.layout, place)
        return sequence_place(plan.layout, self.probe.drawn.offsets, self.probe.case.batch, place)

    def row(self) -> VerifyRow:
        passed = self.cases > 0 and not self.detail
        not_run = self.planned - self.cases
        return VerifyRow(f"reference bits: {self.probe}", self.cases, self.error, passed, self.detail, not_run)


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


def _torch_rows(spec: CollectionSpec, tallies: Sequence[Tally]) -> list[VerifyRow]:
    """First answers beside torch's. Only what torch has: no absent ids, at least one sample; and nothing overflows."""
    if any(tally.device_lost for tally in tallies):
        return [VerifyRow("torch.nn.EmbeddingBag", 0, 0.0, passed=False, not_run=1)]
    rows: dict[str, VerifyRow] = {}
    for tally in tallies:
        probe = tally.probe
        if probe.case.bad_ids or probe.special or probe.case.weights == "special" or not probe.case.batch:
            continue
        if tally.first is None:
            continue
        for found in differences_from_torch(spec, probe.drawn, probe.tables, tally.first):
            row = rows.get(found.peer, VerifyRow(found.peer, 0, 0.0, True))
            detail = row.detail or ("" if found.within_rounding else f"feature {found.feature!r}: {probe}")
            rows[found.peer] = VerifyRow(
                found.peer, row.cases + 1, max(row.max_abs_error, found.error), not detail, detail
            )
    return list(rows.values())
