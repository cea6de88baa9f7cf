"""The judge that measures: candidates run in a worker process, so that a crash or a hang costs one of them only."""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from embforge.codegen.build import build, build_many
from embforge.codegen.cache import cache_dir
from embforge.codegen.errors import CompileError, EmbforgeError
from embforge.codegen.layout import layout_of
from embforge.codegen.params import params_type
from embforge.codegen.plan import Plan
from embforge.codegen.plans import keeps_for_backward
from embforge.codegen.target import target_named
from embforge.tuner.judge.builder import summary
from embforge.tuner.judge.judge import Cache
from embforge.tuner.judge.ledger import STARTING, TIMING, VERIFYING, WAITING
from embforge.tuner.judge.messages import (
    Board,
    Broken,
    GoOn,
    MayITime,
    Prepare,
    Ready,
    Request,
    Rounds,
    Screen,
    Setup,
    TakeAnchor,
    TakeRounds,
    Verified,
    Verify,
)
from embforge.tuner.judge.outcome import CompileFailed, Failure, LaunchFailed, Outcome, TimedOut
from embforge.tuner.judge.process import Helper, HelperDiedError
from embforge.tuner.measure.quiet import Usage

CALL_SECONDS = 10.0
"""Seconds that a kernel's call may take, or `TIMES_THE_ANCHOR` times as long as the anchor's, whichever is more."""
TIMES_THE_ANCHOR = 100.0
START_SECONDS = 600.0
"""Seconds that a step of the worker itself may take, such as filling the tables."""
LOOK_SECONDS = 0.5
"""How often the board is read."""
LOCK_SECONDS = 120.0
"""If other processes hold the timing lock for longer than this, times are taken without it."""
MEMORY_SHARE = 0.9
"""The share of the available memory that tables may take."""


class JudgeError(EmbforgeError, RuntimeError):
    """No candidate can be measured here. The message says what is missing or what broke, and the remedy."""


class BenchJudge:
    """Verifies and times plans on this machine. Its worker starts at once; the first question waits for it.

    `quiet` is entered while something is timed. `call_seconds`: how long a kernel's call may take, or
    `TIMES_THE_ANCHOR` as long as the anchor's, whichever is more. To be used by the thread that made it.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
        call_seconds: float = CALL_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._setup, self._quiet = setup, quiet
        self._call_seconds, self._start_seconds = call_seconds, start_seconds
        self._anchor = Plan.from_text(setup.anchor)
        self._spent = dict.fromkeys((STARTING, VERIFYING, TIMING, WAITING), 0.0)
        self._whole: set[str] = set()  # plans that were verified with their companions
        self._clocks: dict[str, int | None] = {}
        self._others: Usage | None = None
        _check_memory(self._anchor)
        self._folder = tempfile.TemporaryDirectory(prefix="embforge-judge-")
        self._board = Board(Path(self._folder.name) / "board")
        self._failed_place = 0
        self._ready = False
        self._start()

    @property
    def workloads(self) -> tuple[str, ...]:
        return self._setup.workloads

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time spent so far on starting workers, verifying, timing, and waiting for others who time."""
        return dict(self._spent)

    @property
    def clocks(self) -> dict[str, int | None]:
        return self._clocks

    @property
    def others(self) -> Usage | None:
        return self._others

    def wait_until_ready(self) -> None:
        """Waits until the worker is ready. `JudgeError` if it cannot get ready."""
        if self._ready:
            return
        with self._counted(STARTING):
            answer = self._answer()
        if not isinstance(answer, Ready):
            self.close()
            raise JudgeError(
                f"plan {self._anchor.uri}, with which candidates are compared, failed itself: {answer.kind}: "
                f"{answer.why}; look into it by `embforge verify`, or compare with another plan"
            )
        self._call_seconds = max(self._call_seconds, TIMES_THE_ANCHOR * answer.seconds)
        self._ready = True

    def screen(self, plan: Plan) -> Outcome:
        """Verifies the plan against the reference, then times it in a few rounds paired with the anchor."""
        failed = _unbuilt([plan])
        if failed:
            return failed[plan]
        outcome: Outcome = self._ask(Screen(plan.text))
        return outcome

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        """Times interleaved rounds, as `Judge` describes.

        A plan that races may win, and then other kernels of modules get its params, too: so the first time that a plan
        races, it is verified again together with its `companions`, which are built for it.
        """
        if workload not in self.workloads:
            raise ValueError(f"workload {workload!r} is not one of the judge's: {', '.join(self.workloads)}")
        failed = self._verify_whole(list(dict.fromkeys(plans)))
        if failed:
            return {place: failed[plan] for place, plan in enumerate(plans) if plan in failed}
        answer = self._ask(TakeRounds(tuple(plan.text for plan in plans), workload, count, seed, cache))
        if not isinstance(answer, Rounds):
            return {self._failed_place: answer}
        self._clocks, self._others = answer.clocks, answer.others
        return answer.samples

    def close(self) -> None:
        """Ends the worker. May be called again."""
        self._worker.kill()
        self._folder.cleanup()

    def __enter__(self) -> BenchJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Starts a worker, which makes its tables while the kernels that it needs are built."""
        self._ready = False
        self._board.write("starting", patience=True)
        with self._counted(STARTING):
            self._worker = Helper("embforge.tuner.judge.worker", environment={"EMBFORGE_JIT": "0"})
            try:
                self._worker.send(Prepare(self._setup, str(self._board.path)))
                train = _train_plan(self._anchor)
                build_many([self._anchor] if train is None else [self._anchor, train])
                self._worker.send(TakeAnchor(None if train is None else train.text))
            except HelperDiedError as death:
                raise self._broken(str(death)) from None
            except BaseException:
                self.close()
                raise

    def _verify_whole(self, plans: Sequence[Plan]) -> dict[Plan, Outcome]:
        """The failures of plans or of their companions, for plans that were not verified with them yet."""
        new = {plan: [plan, *companions(plan)] for plan in plans if plan.text not in self._whole}
        unbuilt = _unbuilt([part for parts in new.values() for part in parts])
        failed: dict[Plan, Outcome] = {}
        for plan, parts in new.items():
            problem = next((unbuilt[part] for part in parts if part in unbuilt), None) or self._first_problem(parts)
            if problem is None:
                self._whole.add(plan.text)
            else:
                failed[plan] = problem
        return failed

    def _first_problem(self, parts: Sequence[Plan]) -> Outcome | None:
        for part in parts:
            answer: Verified | Outcome = self._ask(Verify(part.text))
            if not isinstance(answer, Verified):
                return answer
        return None

    def _ask(self, request: Request) -> Any:
        """The worker's reply, or the candidate's failure; after a failure there is a new worker."""
        self.wait_until_ready()
        with self._counted(VERIFYING):
            answer = self._answer(request)
        if isinstance(answer, MayITime):
            with ExitStack() as window:
                with self._counted(WAITING):
                    window.enter_context(self._alone())
                with self._counted(TIMING):
                    window.enter_context(self._quiet())
                    answer = self._answer(GoOn())
        if isinstance(answer, Failure):  # the candidate may have damaged the worker's memory
            self._failed_place = self._board.read().plan
            self._worker.kill()
            self._start()
        return answer

    def _answer(self, message: Request | None = None) -> Any:
        """The worker's next message, or the failure that prevented it."""
        try:
            if message is not None:
                self._worker.send(message)
            answer = self._next_message()
        except HelperDiedError as death:
            if not self._ready or self._board.read().patience:
                raise self._broken(str(death)) from None
            return LaunchFailed(f"{death.how} while {self._board.read().doing}")
        if isinstance(answer, Broken):
            raise self._broken(answer.traceback)
        return answer

    def _next_message(self) -> Any:
        """Waits as long as the board shows that the worker makes progress."""
        notice, begun = self._board.read(), time.monotonic()
        while True:
            try:
                return self._worker.receive(LOOK_SECONDS)
            except TimeoutError:
                before, notice = notice, self._board.read()
            now = time.monotonic()
            limit = self._start_seconds if notice.patience else self._call_seconds
            if notice.changes != before.changes:
                begun = now
            elif now - begun > limit:
                if notice.patience:
                    raise self._broken(f"not done within {limit:g} s")
                return TimedOut(f"not done within {limit:g} s while {notice.doing}")

    def _broken(self, why: str) -> JudgeError:
        """The error after a failure of the worker that is not a candidate's fault."""
        self.close()
        return JudgeError(
            f"the worker that measures plans like {self._anchor.uri} broke while {self._board.read().doing}: {why}\n"
            "Trials that have ended are kept; see to it (is there enough memory? does `embforge verify` pass?), then "
            "run the same command again"
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other tuners of this user from timing on this machine's cores, or on the same GPU, at the same time."""
        on_gpu = target_named(self._anchor.target).needs_gpu
        device = f"cuda-{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}" if on_gpu else "cpu"
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"timing-{re.sub(r'[^A-Za-z0-9]+', '_', device)}.lock")
        try:
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.01)
        except (
            Timeout,
            OSError,
            NotImplementedError,
        ) as error:  # the lock is held, or the folder does not support locks
            warnings.warn(
                f"times are taken without {lock.lock_file}, so maybe at the same time as others': {error}", stacklevel=2
            )
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _counted(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._spent[phase] += time.monotonic() - begun


def companions(plan: Plan) -> list[Plan]:
    """The other kernels of a module that get the plan's params, too."""
    if plan.op == "forward" and keeps_for_backward(plan.spec):
        return [_with_op(plan, "forward_train")]
    if plan.op in ("backward", "reduce") and any(feature.weighted for feature in plan.spec.features):
        return [_with_op(plan, "weight_gradient")]
    return []


def _with_op(plan: Plan, op: str) -> Plan:
    return Plan(op, plan.target, plan.arch, plan.id_dtype, plan.spec, plan.params)


def _train_plan(plan: Plan) -> Plan | None:
    """The forward that keeps what a backward by this plan needs; None if it needs nothing."""
    if plan.op.startswith("forward") or not keeps_for_backward(plan.spec):
        return None
    params = params_type(plan.target)()
    return Plan("forward_train", plan.target, plan.arch, plan.id_dtype, plan.spec, params)


def _unbuilt(plans: Sequence[Plan]) -> dict[Plan, Outcome]:
    """Builds plans that are not built yet; returns those that could not be built, and why."""
    try:
        build_many(plans)
    except CompileError:
        return {plan: failure for plan in plans if (failure := _compile_failure(plan)) is not None}
    return {}


def _compile_failure(plan: Plan) -> CompileFailed | None:
    try:
        build(plan)
    except CompileError as error:
        return CompileFailed(summary(str(error)))
    return None


def _check_memory(plan: Plan) -> None:
    """Raises `JudgeError` if the tables are larger than the available memory; does nothing if that is not known."""
    layout = layout_of(plan.spec, plan.update)
    needed = sum(t.table.num_embeddings * (t.stride_bytes + t.state_stride_bytes) for t in layout.tables)
    available = None if target_named(plan.target).needs_gpu else _available_bytes()
    if available is not None and needed > MEMORY_SHARE * available:
        raise JudgeError(
            f"tables of {needed} bytes do not fit into the {available} bytes of memory that are available; free some, "
            "or tune a spec whose tables have fewer rows"
        )


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
