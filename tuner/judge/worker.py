"""The process in which candidates run. It holds tables, batches and right answers, and may crash.

It never compiles: the judge builds kernels before it sends a request.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embforge.backends import device_of
from embforge.codegen.build import locate
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.plan import Plan
from embforge.codegen.target import target_named
from embforge.codegen.targets.cpu.geometry import CACHE_LINE
from embforge.inputs import Batch
from embforge.launch.kernels import Program, load_kernel
from embforge.number_formats import torch_dtype
from embforge.tuner.bench.forward import enough_batches
from embforge.tuner.judge.fixtures import TableFixture, filled_fixture, gradients_for
from embforge.tuner.judge.judge import Cache
from embforge.tuner.judge.messages import (
    Board,
    Broken,
    MayITime,
    Prepare,
    Ready,
    Rounds,
    Screen,
    Setup,
    TakeAnchor,
    TakeRounds,
    Verified,
    Verify,
)
from embforge.tuner.judge.outcome import Failure, LaunchFailed, Paired, Timed, WrongAnswer
from embforge.tuner.judge.verification_cases import VerificationCase, answer_of, cases_of, difference
from embforge.tuner.measure.paired import Rotation, interleaved_rounds, repeats_of
from embforge.tuner.measure.quiet import Clocks, usage_since
from embforge.tuner.measure.timers import CpuTimer, CudaTimer, Run, Timer
from embforge.tuner.workload import workload as traffic
from embforge.tuner.workload.tensors import input_of
from embforge.verify.lookups import torch_threads

FEW_ROUNDS, MOST_ROUNDS = 5, 24
SCREEN_SECONDS = 0.25
"""Seconds of rounds per workload; after them, `FEW_ROUNDS` rounds suffice."""
ALIKE = 1.1
"""Batches count as equal if the largest has at most this many times the ids of the smallest."""
HOPELESS = ((2, 3.0), (FEW_ROUNDS, 1.3))
"""Pairs (rounds, ratio): a candidate is dropped after this many rounds if it took at least `ratio` times the anchor's
time in each."""


def serve(connection: Connection) -> None:
    """Runs in the helper: answers requests one after another until it is killed."""
    try:
        prepare: Prepare = connection.recv()
        worker = Worker(prepare.setup, Board(Path(prepare.board)), connection)
        while True:
            connection.send(worker.answer(connection.recv()))
    except Exception:
        connection.send(Broken(traceback.format_exc()))
        raise


class _FailedError(Exception):
    """The outcome of a candidate that cannot be timed."""

    def __init__(self, outcome: Failure) -> None:
        self.outcome = outcome


@dataclass(frozen=True, eq=False)
class Loaded:
    """A plan's kernel, which can be called with prepared arguments."""

    plan: Plan
    kernel: Any

    def run(self, arguments: tuple[Any, ...]) -> None:
        """Calls the kernel. For a lookup on a CPU it also reads the results, as a caller would.

        Otherwise a kernel that writes past the caches would look fast, although its caller would have to wait.
        """
        results = self.kernel(*arguments)
        if target_named(self.plan.target).is_native and self.plan.op.startswith("forward"):
            for part in results[:2]:
                if part is not None:
                    _read(part)


class Worker:
    """Everything that candidates of one op and spec share."""

    def __init__(self, setup: Setup, board: Board, connection: Connection) -> None:
        self._setup, self._board, self._connection = setup, board, connection
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._plan = plan = Plan.from_text(setup.anchor)
        self._device = device_of(plan.target)
        board.write("filling tables", patience=True)
        self._fixture: TableFixture = filled_fixture(plan.spec, plan.update, self._device)
        board.write("drawing batches", patience=True)
        self._batches = {text: self._drawn(text) for text in setup.workloads}
        self._cases: dict[str, list[VerificationCase]] = {}
        self._cases_for(plan)
        self._prepared: dict[str, list[tuple[Any, ...]]] = {}
        self._anchor: Loaded | None = None
        self._racing: dict[tuple[str, int], Loaded] = {}

    def answer(self, request: TakeAnchor | Verify | Screen | TakeRounds) -> Any:
        """The reply to a request, or the failure of the candidate that it is about."""
        try:
            match request:
                case TakeAnchor():
                    return self._take_anchor(request.train)
                case Verify():
                    self._verify(self._load(request.plan))
                    return Verified()
                case Screen():
                    return self._screen(request.plan)
                case TakeRounds():
                    return self._rounds(request)
        except _FailedError as failed:
            return failed.outcome

    def _take_anchor(self, train: str | None) -> Ready:
        """Prepares the calls that will be timed, and verifies the anchor."""
        self._board.write("preparing batches", patience=True)
        keeper = None if train is None else load_kernel(Program(Plan.from_text(train)).text)
        for text, batches in self._batches.items():
            self._prepared[text] = [self._arguments(batch, keeper) for batch in batches]
        self._anchor = self._load(self._setup.anchor)
        self._verify(self._anchor)
        return Ready(max(map(self._seconds_of_a_call, self._setup.workloads)))

    def _arguments(self, batch: Batch, keeper: Any) -> tuple[Any, ...]:
        op = self._plan.op
        gradients = None if op.startswith("forward") else gradients_for(self._fixture, batch, keeper)
        arguments: tuple[Any, ...] = self._fixture.arguments(op, batch, gradients)
        return arguments

    def _seconds_of_a_call(self, workload: str) -> float:
        assert self._anchor is not None
        self._board.write(f"calling the anchor on {workload}")
        timer, prepared = self._timer("warm"), self._prepared[workload]
        return min(timer.sample(self._anchor.run, [arguments], 1) for arguments in prepared[:3])

    def _screen(self, text: str) -> Timed:
        assert self._anchor is not None
        candidate = self._load(text)
        self._verify(candidate)
        self._ask_to_time()
        both = [candidate, self._anchor]
        with self._no_fault_of_ours():
            return Timed({workload: self._paired(both, workload) for workload in self._setup.workloads})

    def _paired(self, both: Sequence[Loaded], workload: str) -> Paired:
        """Runs a few rounds, and more if these do not show which of the two is faster."""
        self._board.write(f"timing {workload}")
        timer = _Watched(self._timer(self._setup.cache), both, self._board)
        prepared = [self._prepared[workload]] * len(both)
        rotation, rng = Rotation(len(prepared[0])), np.random.default_rng(self._setup.seed)
        runs = [loaded.run for loaded in both]
        repeats = self._whole_turns(workload, repeats_of(runs, prepared, timer, rotation))
        samples: list[tuple[float, ...]] = []
        begun = time.monotonic()
        while len(samples) < FEW_ROUNDS or (len(samples) < MOST_ROUNDS and time.monotonic() - begun < SCREEN_SECONDS):
            samples += interleaved_rounds(runs, prepared, 1, rng, timer, repeats, rotation)
            if any(len(samples) >= rounds and _all_above(samples, times) for rounds, times in HOPELESS):
                break
        candidate, anchor = zip(*samples, strict=True)
        return Paired(candidate, anchor)

    def _rounds(self, request: TakeRounds) -> Rounds:
        racing = self._racers(request.plans)
        self._board.write(f"racing on {request.workload}")
        timer = _Watched(self._timer(request.cache), racing, self._board)
        prepared = [self._prepared[request.workload]] * len(racing)
        rotation, rng = Rotation(len(prepared[0])), np.random.default_rng(request.seed)
        runs = [loaded.run for loaded in racing]
        self._ask_to_time()
        clocks = Clocks.now() if self._device.type == "cpu" else None  # a GPU's own clock times its kernels
        with self._no_fault_of_ours():
            repeats = self._whole_turns(request.workload, repeats_of(runs, prepared, timer, rotation))
            samples = interleaved_rounds(runs, prepared, request.count, rng, timer, repeats, rotation)
        return Rounds(samples, timer.clocks(), usage_since(clocks))

    def _whole_turns(self, workload: str, repeats: list[int]) -> list[int]:
        """Repeats that take every batch equally often if batches have different sizes, as recorded ones may: samples of
        one round must have the same work."""
        sizes = [batch.values.numel() for batch in self._batches[workload]]
        if max(sizes) <= ALIKE * min(sizes):
            return repeats
        return [-(-count // len(sizes)) * len(sizes) for count in repeats]

    def _racers(self, texts: Sequence[str]) -> list[Loaded]:
        """One kernel per plan. A plan's second one is loaded from a copy of its file, at a different address."""
        seen: Counter[str] = Counter()
        racers: dict[tuple[str, int], Loaded] = {}
        for place, text in enumerate(texts):
            key = text, seen[text]
            racers[key] = self._racing.get(key) or self._load(text, place, copied=bool(seen[text]))
            seen[text] += 1
        self._racing = racers  # kernels that do not race any more are dropped, with their memory
        return list(racers.values())

    def _load(self, text: str, place: int = 0, *, copied: bool = False) -> Loaded:
        plan = Plan.from_text(text)
        self._board.write(f"loading {plan.op}", place)
        with self._no_fault_of_ours():
            kernel = load_kernel(Program(plan).text)
            return Loaded(plan, self._twin(kernel) if copied else kernel)

    def _twin(self, kernel: Any) -> Any:
        binary = locate(kernel.plan)
        if target_named(kernel.plan.target).needs_gpu or binary is None:  # the driver loads a new module each time
            return kernel
        copy = Path(tempfile.mkdtemp(dir=self._board.path.parent)) / binary.name  # the judge removes it
        shutil.copyfile(binary, copy)
        return type(kernel)(kernel.plan, copy)

    def _verify(self, loaded: Loaded) -> None:
        """Verifies a kernel by all cases, with one thread and with all threads."""
        plan = loaded.plan
        threads = sorted({1, torch.get_num_threads()}) if self._device.type == "cpu" else [torch.get_num_threads()]
        for case in self._cases_for(plan):
            for count in threads:
                doing = f"verifying {plan.op}, {case.label}" + (f", threads: {count}" if len(threads) > 1 else "")
                self._board.write(doing)
                with self._no_fault_of_ours(), torch_threads(count):
                    got = answer_of(loaded.kernel, case)
                wrong = difference(plan.layout, case, got)
                if wrong is not None:
                    raise _FailedError(WrongAnswer(f"{wrong} (while {doing})"))

    def _cases_for(self, plan: Plan) -> list[VerificationCase]:
        if plan.op not in self._cases:
            self._board.write(f"asking the reference for {plan.op}", patience=True)
            first = {text: batches[0] for text, batches in self._batches.items()}
            with torch_threads(1):  # with more threads, a busy core would make these small operations 100 times slower
                self._cases[plan.op] = cases_of(plan, self._fixture, first, self._setup.seed)
        return self._cases[plan.op]

    def _drawn(self, text: str) -> list[Batch]:
        drawn = enough_batches(self._plan.spec, traffic.parse(text), self._setup.seed)
        return [input_of(batch, self._device, torch_dtype(self._plan.id_dtype)) for batch in drawn]

    def _timer(self, cache: Cache) -> Timer:
        return _timer(self._device.type, cache)

    @contextmanager
    def _no_fault_of_ours(self) -> Iterator[None]:
        """Turns exceptions of a kernel's call or loading into the candidate's failure, unless the kernel is missing."""
        try:
            yield
        except MissingKernelError:
            raise
        except Exception as error:
            doing = self._board.read().doing
            raise _FailedError(LaunchFailed(f"{type(error).__name__}: {error} (while {doing})")) from error

    def _ask_to_time(self) -> None:
        """Waits until the judge has made the machine quiet."""
        self._connection.send(MayITime())
        self._connection.recv()


@dataclass(frozen=True)
class _Watched:
    """A timer that writes on the board, before each sample, which plan it times."""

    timer: Timer
    loaded: Sequence[Loaded]
    board: Board

    def sample(self, run: Run, prepared: Sequence[Any], repeats: int) -> float:
        self._tell(run)
        return self.timer.sample(run, prepared, repeats)

    def repeats_for(self, run: Run, prepared: Sequence[Any]) -> int:
        self._tell(run)
        return self.timer.repeats_for(run, prepared)

    def clocks(self) -> dict[str, int | None]:
        return self.timer.clocks()

    def _tell(self, run: Run) -> None:
        self.board.go_on(next(place for place, loaded in enumerate(self.loaded) if loaded.run == run))


def _read(result: Tensor) -> None:
    """Touches every cache line."""
    lines = result.view(-1).view(torch.uint8)
    whole = lines[: lines.numel() // CACHE_LINE * CACHE_LINE]
    whole.view(torch.int64)[:: CACHE_LINE // 8].sum()


@cache
def _timer(device: str, mode: Cache) -> Timer:
    if device == "cuda":
        return CudaTimer.of(torch.device(device), cold=mode == "cold")
    return CpuTimer.cold() if mode == "cold" else CpuTimer()


def _all_above(samples: Sequence[tuple[float, ...]], times: float) -> bool:
    return all(candidate > times * anchor for candidate, anchor in samples)
