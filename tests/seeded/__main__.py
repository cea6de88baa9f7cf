"""`python -m seeded [TEXT]`: puts every bug of the list into a copy of the repository and runs the tests that catch it.

    PYTHONPATH=tests python -m seeded [TEXT] [--jobs N]

With TEXT, only bugs whose name, area or file contains it. First their tests run without a bug, and must pass. The exit
code is 1 if a bug survived. All runs share a kernel cache, in which a kernel with a bug has a key of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from seeded.listed import ROOT, Bug, read_bugs

KEPT = ROOT / ".pytest_cache"
"""Kernels and precompiled headers of `make test`, which these runs share."""
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist")
TIMEOUT = 600.0
"""Seconds after which the tests of one bug are stopped: a bug that makes ranks wait for each other may do that."""
PYTEST = ("-q", "--tb=short", "-m", "not soak", "-p", "no:cacheprovider", "--hypothesis-seed=0")
PASSED, FAILED = 0, 1
"""pytest's exit codes. With any other code, tests were not found or not run."""


class Answer(NamedTuple):
    """The exit code and the output of a run of pytest."""

    code: int
    text: str

    @property
    def failed(self) -> list[str]:
        """The tests that failed. An error before a test, e.g. in a fixture, does not count."""
        return re.findall(r"^FAILED (\S+)", self.text, re.MULTILINE)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m seeded", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="?", default="", help="only bugs whose name, area or file contains this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    words = parser.parse_args()
    bugs = [bug for bug in read_bugs() if words.text.lower() in f"{bug.name} {bug.area} {bug.file}".lower()]
    if not bugs:
        parser.error(f"no bug's name, area or file has {words.text!r} in it")
    start = time.monotonic()
    tests = sorted({test for bug in bugs for test in bug.caught_by.split()})
    print(f"without a bug: {len(tests)} tests", flush=True)
    with tempfile.TemporaryDirectory(prefix="seeded-") as scratch:
        sound = run(Path(scratch), None, ["-n", str(words.jobs), "--dist", "worksteal", *tests], len(bugs) * TIMEOUT)
    if sound.code != PASSED:
        print(sound.text, f"these tests must pass without a bug (pytest ended with {sound.code})", sep="\n")
        return 1
    caught: Counter[bool] = Counter()
    with ThreadPoolExecutor(words.jobs) as pool:
        for future in as_completed([pool.submit(catch, bug) for bug in bugs]):
            bug, answer, seconds = future.result()
            good = answer.code == FAILED and bool(answer.failed)
            caught[good] += 1
            by = answer.failed[0] if good else f"survived; pytest ended with {answer.code}"
            cells = ("caught" if good else "NOT   ", f"{bug.area:9}", bug.name, by)
            print(f"{sum(caught.values()):3}/{len(bugs)} {seconds:4.0f} s", *cells, sep=" | ", flush=True)
            if not good:
                print("\n".join(f"    {line}" for line in answer.text.splitlines()[-30:]), flush=True)
    areas = Counter(bug.area for bug in bugs)
    print(", ".join(f"{area} {count}" for area, count in sorted(areas.items())))
    print(f"{caught[True]} of {len(bugs)} caught, {time.monotonic() - start:.0f} s")
    return int(caught[False] > 0)


def catch(bug: Bug) -> tuple[Bug, Answer, float]:
    """Runs the bug's tests with the bug, up to the first that fails. Also returns the seconds that this took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seeded-") as scratch:
        answer = run(Path(scratch), bug, ["-x", *bug.caught_by.split()], TIMEOUT)
    return bug, answer, time.monotonic() - start


def run(scratch: Path, bug: Bug | None, words: list[str], timeout: float) -> Answer:
    """Runs pytest in a copy of the repository that has this bug."""
    tree = scratch / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    KEPT.mkdir(exist_ok=True)
    (tree / ".pytest_cache").symlink_to(KEPT)
    if bug is not None:
        path = tree / bug.file
        text = path.read_text(encoding="utf-8")
        if text.count(bug.old) != 1:
            return Answer(-1, f"{bug.file} has the old text {text.count(bug.old)} times: update it in bugs.toml")
        path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),  # before that of the editable install
        "EMBFORGE_TEST_CACHE_DIR": str(KEPT / "embforge"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", *PYTEST, *words]
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Answer(-1, f"not done after {timeout:.0f} s")
    return Answer(process.returncode, text)


if __name__ == "__main__":
    sys.exit(main())
