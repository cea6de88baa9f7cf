"""Compilers that fail, hang or die cost one plan each; they stop during a pause, and die with the process that started
them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embforge.codegen.build import Built, build
from embforge.codegen.errors import CacheError, MissingKernelError, ToolchainError
from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.judge import builder as builder_module
from embforge.tuner.judge.builder import SUMMARY_LINES, Builder, BuildResult, summary
from embforge.tuner.judge.outcome import CompileFailed
from embforge.tuner.judge.process import Helper, HelperDiedError

SPEC = CollectionSpec([TableSpec("t", 200, 8)], [FeatureSpec("f", "t")], name="tiny")
LONG_ENOUGH = 600.0
"""Seconds after which a wait fails. A test that passes waits much less."""


def plan_of(prefetch_bytes: int) -> Plan:
    return Plan("forward", "cpu", host_isa(), "int64", SPEC, CpuParams(prefetch_bytes=prefetch_bytes))


GOOD, BAD = plan_of(0), plan_of(1024)

COMPILER = """#!/bin/sh
# A compiler that works for every plan but one, and writes down its process.
case "$*" in *--version*) echo "a compiler for tests 1.0"; exit 0;; esac
if grep -q {uri} "$PWD/kernel.cpp" $(echo "$*" | tr ' ' '\\n' | grep 'kernel.cpp$'); then
    echo $$ > {folder}/pid.new && mv {folder}/pid.new {folder}/pid
    {bad}
fi
while [ "$1" != -o ]; do shift; done
echo "binary" > "$2"
"""


def eventually(condition: Callable[[], Any]) -> Any:
    """Waits until the condition returns something true, and returns that."""
    deadline = time.monotonic() + LONG_ENOUGH
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to it"
        time.sleep(0.01)
    return found


def state_of(process: int) -> str:
    """The state of a process as Linux writes it, e.g. R, S, T (stopped) or Z; X if the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_dead(process: int) -> bool:
    return state_of(process) in "XZ"


@pytest.fixture
def compiler(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a compiler that does something to the bad plan; gives the file with the number of its process."""

    def make(bad: str) -> Path:
        script = tmp_path / "c++"
        script.write_text(COMPILER.format(uri=BAD.uri, folder=tmp_path, bad=bad))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return tmp_path / "pid"

    return make


def pid_in(file: Path) -> int:
    return int(eventually(lambda: file.exists() and file.read_text()))


def results_of(builder: Builder, *plans: Plan) -> dict[Plan, BuildResult]:
    for plan in plans:
        builder.submit(plan)
    found: dict[Plan, BuildResult] = {}
    for _ in plans:
        done = builder.done(LONG_ENOUGH)
        assert done is not None, "nothing was built"
        found[done[0]] = done[1]
    return found


# ---- Plans that cannot be built -----------------------------------------------------------------------------------


def test_a_plan_is_built_by_the_real_compiler_into_the_cache() -> None:
    with Builder(1) as builder:
        built = results_of(builder, GOOD)[GOOD]
        assert builder.done(0.01) is None
    assert isinstance(built, Built)
    assert build(GOOD).cached
    assert build(GOOD).binary == built.binary


def test_a_refused_source_is_named_with_the_log(compiler: Callable[[str], Path]) -> None:
    compiler("echo 'kernel.cpp:1:1: error: no such thing' >&2; exit 1")
    with Builder(2) as builder:
        results = results_of(builder, BAD, GOOD)
    failed, built = results[BAD], results[GOOD]
    assert isinstance(failed, CompileFailed)
    assert failed.why.startswith("a compiler for tests 1.0 refused the generated source ")
    assert "\nkernel.cpp:1:1: error: no such thing\n" in failed.why
    assert isinstance(built, Built)
    assert built.binary.read_text() == "binary\n"


def test_a_compiler_that_hangs_is_killed(compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time runs out as soon as the compiler hangs, by a clock of the test: a real one could end good plans, too."""
    monkeypatch.setattr(builder_module, "LOOK_SECONDS", 0.1)
    pid = compiler("exec sleep 3600")
    with Builder(1, limit=100.0, clock=lambda: 101.0 if pid.exists() else 0.0) as builder:
        results = results_of(builder, BAD, GOOD)
        assert results[BAD] == CompileFailed("not compiled within 100 s")
        assert isinstance(results[GOOD], Built)
        eventually(lambda: is_dead(pid_in(pid)))


def test_a_compiler_that_kills_its_helper_costs_one_plan(compiler: Callable[[str], Path]) -> None:
    compiler("kill -KILL $PPID; exit 1")
    with Builder(1) as builder:
        results = results_of(builder, BAD, GOOD)
    assert results[BAD] == CompileFailed("the process that compiled it died: SIGKILL")
    assert isinstance(results[GOOD], Built)


def test_a_long_log_is_cut() -> None:
    cut = summary("\n".join(map(str, range(5000)))).splitlines()
    assert cut[:2] == ["0", "1"]
    assert cut[-1] == f"... and {5000 - SUMMARY_LINES} lines more"
    assert len(cut) == SUMMARY_LINES + 1
    assert summary("short\nlog") == "short\nlog"


# ---- What no plan is to blame for ----------------------------------------------------------------------------------


def test_a_machine_without_a_compiler_fails_no_plan(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with Builder(1) as builder:
        builder.submit(GOOD)
        with pytest.raises(ToolchainError, match=r"no-such-compiler not found; install one"):
            builder.done(LONG_ENOUGH)


def test_forbidden_compilation_fails_no_plan(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    with Builder(1) as builder:
        builder.submit(GOOD)
        with pytest.raises(MissingKernelError, match="EMBFORGE_JIT=0 forbids compiling it"):
            builder.done(LONG_ENOUGH)


def test_a_disk_that_cannot_be_written_fails_no_plan(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("")
    script = tmp_path / "c++"
    script.write_text(script.read_text().replace('echo "binary" > "$2"', ":"))  # the library cannot be read then
    with Builder(1) as builder:
        builder.submit(GOOD)
        with pytest.raises(CacheError, match=r"kernel\.so.*free some space"):
            builder.done(LONG_ENOUGH)


# ---- Pauses and ends ----------------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Callable[[], object]]:
    """A named pipe that compilers wait at, and a function that lets one of them through.

    A loop of `sleep` would start processes by vfork, and a shell that is stopped between vfork and exec is not in the
    state T but in D for as long as the pause lasts.
    """
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDWR)  # with both ends open, neither side waits for the other to open its end
    yield lambda: os.write(handle, b"\n")
    os.close(handle)


WAIT_AT_GATE = 'read line < "${0%/*}/gate"'


@pytest.fixture
def busy(compiler: Callable[[str], Path], gate: object) -> Iterator[tuple[Builder, int]]:
    """A builder whose compiler waits at the gate, and the compiler's process."""
    file = compiler(WAIT_AT_GATE)
    with Builder(1) as builder:
        builder.submit(BAD)
        yield builder, pid_in(file)


def test_compilers_are_stopped_during_a_pause(busy: tuple[Builder, int], gate: Callable[[], object]) -> None:
    builder, process = busy
    with builder.paused():
        eventually(lambda: state_of(process) == "T")
        gate()
        assert builder.done(0.2) is None
        assert state_of(process) == "T"
        running = builder._clock.running()
        assert builder._clock.running() == running  # so that a pause is no part of the limit
    done = builder.done(LONG_ENOUGH)
    assert done is not None
    assert isinstance(done[1], Built)


def test_a_pause_ends_if_what_is_timed_raises(busy: tuple[Builder, int], gate: Callable[[], object]) -> None:
    builder, process = busy
    with pytest.raises(KeyboardInterrupt), builder.paused():
        raise KeyboardInterrupt
    eventually(lambda: state_of(process) != "T")
    gate()
    assert builder.done(LONG_ENOUGH) is not None


def test_a_builder_that_is_not_pausable_works_during_a_pause(
    compiler: Callable[[str], Path], gate: Callable[[], object]
) -> None:
    file = compiler(WAIT_AT_GATE)
    with Builder(1, pausable=False) as builder, builder.paused():
        builder.submit(BAD)
        pid_in(file)
        gate()
        assert builder.done(LONG_ENOUGH) is not None


@pytest.mark.parametrize("paused", [False, True])
def test_close_kills_what_is_being_built(busy: tuple[Builder, int], paused: bool) -> None:
    builder, process = busy
    builder.submit(GOOD)  # never begun
    scratch = Path(builder._scratch.name)
    if paused:
        with builder.paused():
            builder.close()
    else:
        builder.close()
    eventually(lambda: is_dead(process))
    assert not scratch.exists()
    builder.close()


# ---- Helpers die with the process that started them ---------------------------------------------------------------

PARENT = """
import sys
from embforge.codegen.plan import Plan
from embforge.tuner.judge.builder import Builder

builder = Builder(1)
builder.submit(Plan.from_text(sys.argv[1]))
sys.stdin.readline()  # until it is time
with builder.paused():
    print("paused", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("paused", [False, True])
def test_compilers_die_with_a_killed_parent_also_when_paused(compiler: Callable[[str], Path], paused: bool) -> None:
    file = compiler("exec sleep 3600")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, BAD.text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        process = pid_in(file)
        helper = os.getpgid(process)
        if paused:
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == "paused\n"
            eventually(lambda: state_of(process) == state_of(helper) == "T")
        parent.kill()
    try:
        eventually(lambda: is_dead(process) and is_dead(helper))
    finally:
        if not is_dead(helper):
            os.killpg(helper, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_helper_in_a_call_that_hangs_dies_with_a_killed_parent(tmp_path: Path) -> None:
    module_with(tmp_path, "import ctypes; connection.send(1); ctypes.CDLL(None).sleep(3600)")
    code = f"""
        import time
        from embforge.tuner.judge.process import Helper
        helper = Helper("served", environment={{"PYTHONPATH": {str(tmp_path)!r}}})
        helper.receive()
        print(helper.pid, flush=True)
        time.sleep(3600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        assert not is_dead(helper)
        parent.kill()
    eventually(lambda: is_dead(helper))


# ---- Helpers ------------------------------------------------------------------------------------------------------


def module_with(folder: Path, body: str) -> None:
    (folder / "served.py").write_text(f"import os, signal, struct\ndef serve(connection):\n    {body}\n")


def helper_with(folder: Path, body: str) -> Helper:
    module_with(folder, body)
    return Helper("served", environment={"PYTHONPATH": str(folder)})


@pytest.mark.parametrize(
    ("body", "how", "wrote"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", ""),
        ("print('last words', flush=True); os._exit(3)", "exit code 3", "last words"),
        ("[print(n) for n in range(99)]; raise SystemExit", "exit code 0", "93\n94\n95\n96\n97\n98"),
        ("raise KeyError('mistake')", "exit code 1", "KeyError: 'mistake'"),
        # It dies in the middle of a message.
        ("os.write(connection.fileno(), struct.pack('!i', 100) + b'half'); os._exit(4)", "exit code 4", ""),
    ],
)
def test_the_error_says_how_a_helper_died(tmp_path: Path, body: str, how: str, wrote: str) -> None:
    helper = helper_with(tmp_path, body)
    with pytest.raises(HelperDiedError) as death:
        helper.receive(LONG_ENOUGH)
    assert death.value.how == how
    assert str(death.value).startswith(f"{how}; it wrote:\n" if wrote else how)
    assert str(death.value).endswith(wrote)
    for again in (lambda: helper.receive(1), lambda: helper.send(1)):
        with pytest.raises(HelperDiedError, match=how):
            again()
    helper.kill()


def test_a_helper_answers_and_is_killed(tmp_path: Path) -> None:
    helper = helper_with(tmp_path, "connection.send(connection.recv() + os.nice(0)); connection.recv()")
    helper.send(41)
    assert helper.receive(LONG_ENOUGH) == 41 + os.nice(0)
    with pytest.raises(TimeoutError):
        helper.receive(0.01)
    assert os.getpgid(helper.pid) == helper.pid  # Ctrl-C in a terminal must not reach it
    helper.kill()
    assert is_dead(helper.pid)
    helper.kill()
