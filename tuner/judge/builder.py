"""Compiles candidates ahead of their measurement, in processes that are paused while something is timed."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from embforge.codegen.build import Built, build
from embforge.codegen.errors import CompileError, EmbforgeError, PlanError
from embforge.codegen.plan import Plan
from embforge.codegen.target import target_named
from embforge.tuner.judge.outcome import CompileFailed, Invalid
from embforge.tuner.judge.process import Helper, HelperDiedError

COMPILE_SECONDS = 300.0
"""A compilation that has run for this many seconds, without pauses, is stopped."""
LOOK_SECONDS = 1.0
"""How often that time is checked, because it does not run during pauses but a wait does."""

BuildResult = Built[Plan] | CompileFailed | Invalid


class Builder:
    """Builds plans in `workers` processes. A thread for each of them sends it one plan after another.

    Any number of plans can be submitted; `done` returns results as they come. A plan that cannot be built is a result,
    too. Problems that concern no single plan, such as a machine without a compiler, are raised by `done`.
    """

    def __init__(
        self,
        workers: int,
        *,
        pausable: bool = True,
        limit: float = COMPILE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Plan, BuildResult] | Exception] = queue.SimpleQueue()
        self._pausable, self._limit = pausable, limit
        self._clock = _Clock(clock)
        self._lock = threading.Lock()  # guards the helpers, and whether they are paused
        self._helpers: set[Helper] = set()
        self._paused = self._closed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="embforge-builder-")  # temporary files of killed compilers
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: Plan) -> None:
        """Queues a plan, which is built as soon as a worker is free."""
        self._plans.put(plan)

    def done(self, timeout: float | None = None) -> tuple[Plan, BuildResult] | None:
        """The next plan that was built or could not be built; None if there is none within `timeout` seconds.

        It raises problems that are not the plan's fault, such as `ToolchainError` or a full disk.
        """
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(result, Exception):
            raise result
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses all compilers within the `with` block, if the builder is pausable. It cannot be nested."""
        if self._pausable:
            self._pause(True)
        try:
            yield
        finally:
            if self._pausable:
                self._pause(False)

    def close(self) -> None:
        """Kills running builds and drops queued ones. May be called again."""
        with self._lock:
            self._closed = True
            for helper in self._helpers:
                helper.interrupt()
        for _ in self._threads:
            self._plans.put(None)
        for thread in self._threads:
            thread.join()
        self._scratch.cleanup()

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pause(self, wanted: bool) -> None:
        with self._lock:
            self._paused = wanted
            for helper in self._helpers:
                if wanted:
                    helper.pause()
                else:
                    helper.resume()
        self._clock.pause(wanted)

    def _work(self) -> None:
        """The loop of a thread: sends its helper one plan after another, and starts a new helper if that one died."""
        helper: Helper | None = None
        while (plan := self._plans.get()) is not None and not self._closed:
            try:
                helper = helper or self._started()
                self._results.put((plan, self._answer(helper, plan)))
            except HelperDiedError as death:
                why = f"the process that compiled it died: {death}"
                self._results.put((plan, CompileFailed(why)))
            except TimeoutError:
                self._results.put((plan, CompileFailed(f"not compiled within {self._limit:g} s")))
            except Exception as error:  # not the plan's fault: `done` raises it
                self._results.put(error)
            else:
                continue
            self._dismiss(helper)
            helper = None
        self._dismiss(helper)

    def _started(self) -> Helper:
        with self._lock:
            if self._closed:
                raise EmbforgeError("the builder is closed; make another one")
            helper = Helper("embforge.tuner.judge.builder", environment={"TMPDIR": self._scratch.name})
            self._helpers.add(helper)
            if self._paused:
                helper.pause()
        return helper

    def _dismiss(self, helper: Helper | None) -> None:
        if helper is not None:
            with self._lock:
                self._helpers.discard(helper)
            helper.kill()

    def _answer(self, helper: Helper, plan: Plan) -> BuildResult:
        begun = self._clock.running()
        helper.send(plan.text)
        while True:
            with suppress(TimeoutError):
                answer = helper.receive(LOOK_SECONDS)
                if isinstance(answer, Exception):
                    raise answer
                result: BuildResult = answer
                return result
            if self._clock.running() - begun > self._limit:
                raise TimeoutError


def serve(connection: Connection) -> None:
    """Runs in the helper: builds plans from their texts until it is killed. It never imports torch."""
    while True:
        connection.send(_result(Plan.from_text(connection.recv())))


def _result(plan: Plan) -> BuildResult | Exception:
    from embforge.tuner.search.space import resource_problem

    try:
        built = build(plan, resources=target_named(plan.target).needs_gpu)
        problem = resource_problem(plan, built.resources)
    except CompileError as error:
        return CompileFailed(summary(str(error)))
    except PlanError as error:
        return Invalid(str(error))
    except (EmbforgeError, OSError) as error:  # e.g. a missing compiler or a full disk, which would fail every plan
        return error
    return built if problem is None else Invalid(problem)


SUMMARY_LINES = 30


def summary(text: str) -> str:
    """A compiler's log can have thousands of lines; the first ones say what is wrong."""
    lines = text.splitlines()
    more = [f"... and {len(lines) - SUMMARY_LINES} lines more"] if len(lines) > SUMMARY_LINES else []
    return "\n".join(lines[:SUMMARY_LINES] + more)


class _Clock:
    """A clock that can be paused: seconds of another clock since it was made, without pauses."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._now = clock
        self._last = clock()
        self._running = 0.0
        self._paused = False

    def running(self) -> float:
        with self._lock:
            self._tick()
            return self._running

    def pause(self, wanted: bool) -> None:
        with self._lock:
            self._tick()
            self._paused = wanted

    def _tick(self) -> None:
        now = self._now()
        self._running += 0.0 if self._paused else now - self._last
        self._last = now
