"""What all tests share: a kernel cache for tests only, and with CI=true a failure for each skip that is not listed."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support.precompiled_headers import precompile

ROOT = Path(__file__).parent.parent
ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
KERNELS_BEFORE = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Examples of hypothesis have no time limit, and Ctrl-C works however tests are started."""
    settings.register_profile("patient", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
    # A shell starts background jobs with Ctrl-C ignored, and programs under test would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _test_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests share one kernel cache and use neither the user's cache nor the user's tuned results.

    EMBFORGE_TEST_CACHE_DIR says where it is. All workers of pytest-xdist use the same one.
    """
    os.environ["EMBFORGE_TUNED_DIR"] = str(tmp_path_factory.mktemp("tuned"))
    os.environ["EMBFORGE_SHIPPED_DIR"] = str(tmp_path_factory.mktemp("shipped"))  # tests make their own results
    os.environ["EMBFORGE_CACHE_DIR"] = str(_kernel_cache())
    os.environ.pop("EMBFORGE_KERNELS", None)
    os.environ.pop("EMBFORGE_JIT", None)
    if headers := precompile(ROOT / ".pytest_cache" / "headers"):
        os.environ["CPATH"] = os.pathsep.join(filter(None, (str(headers), os.environ.get("CPATH"))))


def _kernel_cache() -> Path:
    return Path(os.environ.get("EMBFORGE_TEST_CACHE_DIR") or ROOT / ".pytest_cache" / "embforge")


def _kernels() -> int:
    return sum(1 for _ in (_kernel_cache() / "kernels").glob("*/*/entry.json"))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[KERNELS_BEFORE] = _kernels()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the number of compiled kernels, because compiling dominates the time of a run."""
    before = terminalreporter.config.stash[KERNELS_BEFORE]
    terminalreporter.write_line(f"{_kernels() - before} kernels compiled into the shared cache, which had {before}")


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache for one test."""
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finals run as on a system that does not report the CPU time of other processes: no round is repeated."""
    from embforge.tuner.judge.bench_judge import BenchJudge

    monkeypatch.setattr(BenchJudge, "others", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report, collector.nodeid)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, name: str) -> None:
    """With CI=true a skip is a failure unless its reason is on the checked-in list."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if reason not in allowed_skip_reasons():
        report.outcome = "failed"
        report.longrepr = f"{name} skipped: {reason!r} is not in {ALLOWED_SKIPS.name}"


def allowed_skip_reasons() -> set[str]:
    lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}
