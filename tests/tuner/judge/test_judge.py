"""A candidate that crashes, hangs or computes wrongly costs one trial, is named, and leaves no trace for the next.

Bad candidates are real shared libraries in a real cache entry: they call the anchor's kernel and then misbehave.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from support.tuner_doctor import CRASH, HANG, WRONG, Doctor

from embforge.codegen import build as building
from embforge.codegen import cache
from embforge.codegen.build import source_of
from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuBackwardParams, CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.codegen.plans import update_named
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets import toolchain_of
from embforge.launch.kernels import Program, load_kernel
from embforge.tuner.judge import bench_judge
from embforge.tuner.judge.bench_judge import BenchJudge, JudgeError
from embforge.tuner.judge.ledger import STARTING, TIMING, VERIFYING, WAITING
from embforge.tuner.judge.messages import Board, GoOn, MayITime, Ready, Screen, Setup, TakeAnchor
from embforge.tuner.judge.outcome import CompileFailed, LaunchFailed, Timed, TimedOut, WrongAnswer
from embforge.tuner.judge.verification_cases import answer_of, difference
from embforge.tuner.judge.worker import HOPELESS, Worker

SPEC = CollectionSpec([TableSpec("t", 200, 8)], [FeatureSpec("f", "t")], name="tiny")
WEIGHTED = CollectionSpec([TableSpec("t", 200, 8)], [FeatureSpec("f", "t", weighted=True)], name="weighted")
WORKLOAD = "uniform,len=fixed:3,batch=64"
OPS: dict[str, tuple[str, Update | None]] = {
    "gradients": ("reduce", None),
    "sgd": ("backward", update_named("sgd")),
    "adam": ("backward", update_named("adam")),
}


def plan_of(params: Params | None = None, spec: CollectionSpec = SPEC, op: str = "forward", rule: Any = None) -> Plan:
    params = params or (CpuParams() if op.startswith("forward") else CpuBackwardParams())
    return Plan(op, "cpu", host_isa(), "int64", spec, params, rule)


ANCHOR, GOOD = plan_of(), plan_of(CpuParams(prefetch_bytes=0))
BAD = plan_of(CpuParams(prefetch_bytes=1024))


@pytest.fixture(scope="module")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctor]:
    with pytest.MonkeyPatch.context() as patch:
        usual = os.environ["EMBFORGE_CACHE_DIR"]
        patch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path_factory.mktemp("doctored")))
        yield Doctor(usual, ANCHOR)


# ---- The judge and its process ------------------------------------------------------------------------------------


class Quiet:
    """A context that the judge enters while it times; `inside` is called in it, so that tests can look."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered += 1
        self.inside()
        yield


@pytest.fixture(scope="module")
def quiet() -> Quiet:
    return Quiet()


@pytest.fixture(scope="module")
def judge(doctor: Doctor, quiet: Quiet) -> Iterator[BenchJudge]:
    doctor.cure(ANCHOR)
    doctor.spoil(GOOD)
    with BenchJudge(Setup(ANCHOR.text, (WORKLOAD,)), quiet=quiet, call_seconds=2.0) as judge:
        yield judge


def assert_good_is_timed(judge: BenchJudge) -> None:
    outcome = judge.screen(GOOD)
    assert isinstance(outcome, Timed), outcome
    paired = outcome.workloads[WORKLOAD]
    assert len(paired.candidate) == len(paired.anchor) >= HOPELESS[0][0]
    assert 0 < outcome.score < 10


def test_a_segfault_is_named_and_the_next_candidate_is_timed(judge: BenchJudge, doctor: Doctor) -> None:
    outcome = judge.screen(doctor.spoil(BAD, CRASH))
    assert isinstance(outcome, LaunchFailed)
    assert re.match(r"SIGSEGV while verifying forward, B=9, .*, threads: 1$", outcome.why)
    assert_good_is_timed(judge)


def test_a_kernel_that_never_returns_times_out(judge: BenchJudge, doctor: Doctor) -> None:
    outcome = judge.screen(doctor.spoil(BAD, f"if (batch == 64) {HANG}"))
    assert outcome == TimedOut(f"not done within 2 s while verifying forward, a batch of {WORKLOAD}, threads: 1")
    assert_good_is_timed(judge)


def test_a_plan_that_fails_in_rounds_is_named_by_its_position(judge: BenchJudge, doctor: Doctor) -> None:
    late = doctor.spoil(BAD, f"if (calls > 100) {CRASH}")  # past verification
    failed = judge.rounds([ANCHOR, GOOD, late], WORKLOAD, 120, seed=1)  # a round calls each at least once
    assert failed == {2: LaunchFailed(f"SIGSEGV while racing on {WORKLOAD}")}
    samples = judge.rounds([ANCHOR, GOOD, GOOD], WORKLOAD, 3, seed=1)
    assert [len(row) for row in samples] == [3, 3, 3]
    assert all(sample > 0 for row in samples for sample in row)
    assert set(judge.clocks) == {"cpu"}


def test_a_duplicate_is_loaded_from_a_copy_of_its_file(judge: BenchJudge) -> None:
    assert len(judge.rounds([ANCHOR, GOOD, GOOD], WORKLOAD, 1, seed=2)) == 1
    maps = Path(f"/proc/{judge._worker.pid}/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    lines = maps.read_text().splitlines()
    places = {line.split()[-1] for line in lines if line.endswith(".so") and (GOOD.uri in line or "judge-" in line)}
    assert len(places) == 2
    first, second = (Path(place).read_bytes() for place in places)
    assert first == second


def test_cold_rounds_are_taken_with_empty_caches(judge: BenchJudge) -> None:
    warm, cold = (judge.rounds([ANCHOR], WORKLOAD, 5, seed=3, cache=mode) for mode in ("warm", "cold"))  # type: ignore[arg-type]
    assert isinstance(warm, list)
    assert isinstance(cold, list)
    assert min(cold) > min(warm)  # rows, ids and code come from memory


def test_a_workload_that_the_judge_was_not_made_with_is_refused(judge: BenchJudge) -> None:
    with pytest.raises(ValueError, match=f"'uniform' is not one of the judge's: {WORKLOAD}"):
        judge.rounds([ANCHOR], "uniform", 1, seed=0)


def test_a_plan_that_does_not_compile_is_a_result(judge: BenchJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "render", lambda *_: "this is no C++;\n")
    outcome = judge.screen(BAD)
    assert isinstance(outcome, CompileFailed)
    assert "refused the generated source" in outcome.why.splitlines()[0]
    assert "error: " in outcome.why
    monkeypatch.undo()
    assert_good_is_timed(judge)


def test_time_is_counted_by_phase(judge: BenchJudge) -> None:
    judge.wait_until_ready()
    before = judge.seconds
    assert_good_is_timed(judge)
    after = judge.seconds
    assert set(after) == {STARTING, VERIFYING, TIMING, WAITING}
    assert after[TIMING] > before[TIMING]
    assert after[VERIFYING] > before[VERIFYING]
    assert after[STARTING] == before[STARTING]


# ---- Other tuners ----------------------------------------------------------------------------------------------


def timing_lock() -> FileLock:
    return FileLock(cache.cache_dir() / "timing-cpu.lock")


def test_a_busy_timing_lock_is_waited_for_and_released(judge: BenchJudge, quiet: Quiet) -> None:
    judge.wait_until_ready()
    held, released, refused = threading.Event(), threading.Event(), []

    def another_tuner() -> None:
        with timing_lock():
            held.set()
            released.wait(0.3)  # a timeout, because no other thread sets it: a judge that does not wait would time now
            released.set()

    def inside() -> None:
        assert released.is_set(), "timed while another tuner held the lock"
        with pytest.raises(Timeout):
            timing_lock().acquire(timeout=0)
        refused.append(True)

    other = threading.Thread(target=another_tuner)
    other.start()
    assert held.wait()
    quiet.inside = inside
    try:
        assert_good_is_timed(judge)
    finally:
        quiet.inside = lambda: None
        other.join()
    assert refused == [True]
    with timing_lock().acquire(timeout=0):
        pass


def test_a_judge_times_without_a_lock_that_is_held_too_long(judge: BenchJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_judge, "LOCK_SECONDS", 0.05)
    with timing_lock(), pytest.warns(UserWarning, match="times are taken without .*timing-cpu.lock"):
        assert_good_is_timed(judge)


def test_compilers_are_stopped_only_while_something_is_timed(judge: BenchJudge, quiet: Quiet, doctor: Doctor) -> None:
    before = quiet.entered
    assert_good_is_timed(judge)
    assert quiet.entered == before + 1
    judge.rounds([ANCHOR], WORKLOAD, 1, seed=0)
    assert quiet.entered == before + 2


# ---- Failures that no candidate causes ------------------------------------------------------------------------------


def test_an_anchor_that_crashes_ends_the_judge_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from embforge.tuner.judge.messages import Board\n"
        "def serve(connection):\n"
        "    Board(Path(connection.recv().board)).write('verifying forward')\n"
        "    connection.recv()\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    helper, folder = bench_judge.Helper, tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(
        bench_judge, "Helper", lambda *_, environment: helper("crashing", environment={"PYTHONPATH": str(tmp_path)})
    )
    judge = BenchJudge(Setup(ANCHOR.text, (WORKLOAD,)))
    with pytest.raises(JudgeError, match=r"(?s)broke while verifying forward: SIGSEGV.*`embforge verify`"):
        judge.screen(ANCHOR)
    assert list(folder.iterdir()) == []


def test_a_judge_that_cannot_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[Any] = []
    helper = bench_judge.Helper
    monkeypatch.setattr(bench_judge, "Helper", lambda *a, **k: started.append(helper(*a, **k)) or started[0])

    def no_disk(plans: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(bench_judge, "build_many", no_disk)
    with pytest.raises(OSError, match="no space left"):
        BenchJudge(Setup(ANCHOR.text, (WORKLOAD,)))
    assert list(tmp_path.iterdir()) == []
    assert started[0]._process.poll() is not None


def test_tables_that_do_not_fit_into_memory_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_judge, "_available_bytes", lambda: 200 * 32)
    with pytest.raises(JudgeError, match=r"tables of \d+ bytes do not fit into the 6400 bytes .* fewer rows"):
        BenchJudge(Setup(ANCHOR.text, (WORKLOAD,)))


# ---- The worker's answers, in this process ------------------------------------------------------------------------


class Judging:
    """The judge's end of the connection: it lets the worker time whenever the worker asks."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def send(self, message: Any) -> None:
        self.asked.append(message)

    def recv(self) -> GoOn:
        return GoOn()


def worker_of(anchor: Plan, folder: Path, train: Plan | None = None) -> Worker:
    worker = Worker(Setup(anchor.text, (WORKLOAD,)), Board(folder / "board"), Judging())  # type: ignore[arg-type]
    ready = worker.answer(TakeAnchor(None if train is None else train.text))
    assert isinstance(ready, Ready), ready
    assert ready.seconds > 0
    return worker


@pytest.fixture(scope="module")
def worker(doctor: Doctor, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    doctor.cure(ANCHOR)
    return worker_of(ANCHOR, tmp_path_factory.mktemp("worker"))


def fresh(number: int) -> Plan:
    """A plan whose kernel this process has not loaded yet."""
    choices = [(level, tiles, rows) for level in (1, 2) for tiles in (2, 4, 8, 16) for rows in (2, 4)]
    level, tiles, rows = choices[number]
    return plan_of(CpuParams(prefetch_level=level, tile_vectors=tiles, rows_unrolled=rows))


def test_a_correct_kernel_passes(worker: Worker, doctor: Doctor) -> None:
    outcome = worker.answer(Screen(doctor.spoil(fresh(0)).text))
    assert isinstance(outcome, Timed)
    judging = worker._connection
    assert isinstance(judging, Judging)
    assert isinstance(judging.asked[-1], MayITime)


def test_a_wrong_answer_is_named_by_its_place(worker: Worker, doctor: Doctor) -> None:
    outcome = worker.answer(Screen(doctor.spoil(fresh(9), after=WRONG).text))
    assert isinstance(outcome, WrongAnswer)
    assert re.match(
        r"pooled: feature 'f', sample 0, .*: expected -?\d.*, got 12345\.0 \(while verifying forward, B=9", outcome.why
    )


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="needs two cores")
def test_a_kernel_wrong_with_a_second_thread_count_only_is_caught(worker: Worker, doctor: Doctor) -> None:
    plan = doctor.spoil(fresh(1), after=f"if (threads > 1) {{ {WRONG} }}")
    outcome = worker.answer(Screen(plan.text))
    assert isinstance(outcome, WrongAnswer)
    assert outcome.why.endswith(f", threads: {torch.get_num_threads()})")
    assert "got 12345.0" in outcome.why


@pytest.mark.parametrize(
    ("number", "condition", "label"),
    [
        (2, "batch == 3", "B=3, split lengths, zipf int64 ids"),
        (3, "batch == 1", "B=1, usual lengths, uniform int64 ids"),
        (4, "batch == 64", f"a batch of {WORKLOAD}"),
    ],
)
def test_a_kernel_wrong_on_one_batch_only_is_caught(
    worker: Worker, doctor: Doctor, number: int, condition: str, label: str
) -> None:
    plan = doctor.spoil(fresh(number), after=f"if ({condition}) {{ {WRONG} }}")
    outcome = worker.answer(Screen(plan.text))
    assert isinstance(outcome, WrongAnswer)
    assert f"(while verifying forward, {label}, " in outcome.why


@pytest.mark.parametrize(("number", "condition"), [(5, "true"), (6, "batch == 70"), (7, "threads > 1")])
def test_a_kernel_that_writes_nothing_is_wrong(worker: Worker, doctor: Doctor, number: int, condition: str) -> None:
    outcome = worker.answer(Screen(doctor.spoil(fresh(number), f"if ({condition}) return 0;").text))
    assert isinstance(outcome, WrongAnswer)


TWO_ROWS_ONLY = """
    static float all[1 << 16];
    int64_t copied[16];
    for (int word = 0; word < 10; ++word) copied[word] = words[word] == pooled ? int64_t(all) : words[word];
    const int64_t got = real<int64_t (*)(const int64_t*)>("%s_words")(copied);
    for (int64_t i = 0; i < 16 && i < batch * 8; ++i) reinterpret_cast<float*>(pooled)[i] = all[i];
    return got;
"""
"""Two rows, because the system itself writes to the beginning of memory that was given back."""


def test_memory_that_a_kernel_does_not_write_is_never_the_right_answer(worker: Worker, doctor: Doctor) -> None:
    lazy = load_kernel(Program(doctor.spoil(fresh(8), TWO_ROWS_ONLY % ANCHOR.uri)).text)
    right = load_kernel(Program(ANCHOR).text)
    for case in worker._cases_for(ANCHOR):
        if case.batch.batch > 2:
            assert difference(ANCHOR.layout, case, answer_of(right, case)) is None
            assert difference(ANCHOR.layout, case, answer_of(lazy, case)) is not None, case.label


def test_an_error_that_a_call_raises_is_an_outcome(worker: Worker, doctor: Doctor) -> None:
    outcome = worker.answer(Screen(doctor.spoil(fresh(10), "return 3;").text))
    assert isinstance(outcome, LaunchFailed)
    assert re.match(r"MemoryError: .* \(while verifying forward, B=9, ", outcome.why)


def test_a_library_that_cannot_be_loaded_is_an_outcome(worker: Worker, doctor: Doctor) -> None:
    plan = fresh(11)
    recipe = building._recipe(plan, toolchain_of("cpu"), source_of(plan))
    cache.fetch(replace(recipe, compile=lambda source: b"no library"))
    outcome = worker.answer(Screen(plan.text))
    assert isinstance(outcome, LaunchFailed)
    assert outcome.why.startswith("OSError: ")
    assert outcome.why.endswith("(while loading forward)")


@pytest.mark.parametrize("name", OPS)
def test_backwards_are_verified_and_timed(name: str, doctor: Doctor, tmp_path: Path) -> None:
    op, update = OPS[name]
    anchor = plan_of(op=op, rule=update)
    doctor.cure(anchor)
    worker = worker_of(anchor, tmp_path)
    good = plan_of(CpuBackwardParams(prefetch_bytes=0), op=op, rule=update)
    outcome = worker.answer(Screen(doctor.spoil(good, like=anchor).text))
    assert isinstance(outcome, Timed), outcome
    bad = plan_of(CpuBackwardParams(prefetch_bytes=1024), op=op, rule=update)
    if op == "reduce":  # counted, but not written
        doctor.spoil(bad, "return 0;", like=anchor)
        expected = r"(rows|gradients) of table 't', element \d+: expected .*, got .* \(while verifying reduce, B=5"
    else:  # the kernel also writes to a row that it was not asked to update
        doctor.spoil(bad, after="**reinterpret_cast<float**>(metadata) = 7;", like=anchor)
        expected = r"table 't', row 0, column 0: expected .*, got 7.0 \(while verifying backward, B=5"
    outcome = worker.answer(Screen(bad.text))
    assert isinstance(outcome, WrongAnswer)
    assert re.match(expected, outcome.why)


def test_a_plan_races_only_if_its_companion_is_right_too(doctor: Doctor) -> None:
    update = update_named("sgd")
    anchor = plan_of(spec=WEIGHTED, op="backward", rule=update)
    doctor.cure(anchor)
    with BenchJudge(Setup(anchor.text, (WORKLOAD,))) as judge:
        gradient = doctor.cure(plan_of(spec=WEIGHTED, op="weight_gradient"))
        assert gradient.exists()
        params = CpuBackwardParams(prefetch_bytes=0)
        good = doctor.spoil(plan_of(params, WEIGHTED, "backward", update), like=anchor)
        [companion] = bench_judge.companions(good)
        assert (companion.op, companion.params) == ("weight_gradient", params)
        wrong = "if (num_values > 0) reinterpret_cast<float*>(weight_gradient)[0] = 9;"
        doctor.spoil(companion, after=wrong, like=plan_of(spec=WEIGHTED, op="weight_gradient"))
        assert isinstance(judge.screen(good), Timed)
        failed = judge.rounds([anchor, good, good], WORKLOAD, 2, seed=0)
        assert isinstance(failed, dict)
        assert set(failed) == {1, 2}
        assert isinstance(failed[1], WrongAnswer)
        assert failed[1].why.startswith("gradient of weights, element 0: expected")
        assert isinstance(judge.rounds([anchor, anchor], WORKLOAD, 2, seed=0), list)  # as if nothing had happened
