"""Times how long a spec takes to become a kernel: `python -m benchmarks.build_times`.

Every figure is the median of fresh processes: cold with an empty cache, then from the cache. "with imports" counts
from the first line of Python, "build" from the spec file to the binary on disk. "build" is compared with the limits
below: a user must not have to wait long for a new spec for a GPU, and must not notice the time for a cached one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

WORK = """
import time
start = time.perf_counter()
import json, sys
from embforge.codegen.build import build
from embforge.cli.common import load_spec
from embforge.codegen.params import params_type
from embforge.codegen.plan import Plan
from embforge.codegen.targets import toolchain_of
name, target, arch = sys.argv[1:]
toolchain_of(target)  # imports the target
imported = time.perf_counter()
built = build(Plan("forward", target, arch, "int64", load_spec(name), params_type(target)()))
done = time.perf_counter()
print(json.dumps({"build": done - imported, "all": done - start, "cached": built.cached}))
"""
CASES = (("dlrm", "cuda", "sm_90"), ("dlrm", "cuda", "sm_100"), ("mixed", "cuda", "sm_90"), ("dlrm", "cpu", "avx2"))
ROUNDS = 5
COLD_SECONDS = {("dlrm", "cuda"): 2.0}
"""The longest time that a cold build may take, by spec and target; other builds have no limit."""
CACHED_SECONDS = 0.020
"""The longest time that any build from the cache may take."""


def main() -> None:
    """Prints the table, then a line for every limit: met or missed."""
    verdicts = []
    table = Table("spec", "target", "arch", title=f"spec to binary, medians of {ROUNDS} fresh processes")
    for heading in ("cold build", "cold with imports", "cached build", "cached with imports"):
        table.add_column(heading, justify="right")
    for case in CASES:
        cold, cached = [], []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(prefix="embforge-") as directory:
                cold.append(_run(case, directory))
                cached.append(_run(case, directory))
        assert not any(run["cached"] for run in cold) and all(run["cached"] for run in cached)
        table.add_row(*case, *(_shown(_median(runs, field)) for runs in (cold, cached) for field in ("build", "all")))
        verdicts += verdicts_of(case, _median(cold, "build"), _median(cached, "build"))
    Console().print(table)
    for verdict in verdicts:
        Console().print(verdict, highlight=False, soft_wrap=True)


def verdicts_of(case: tuple[str, str, str], cold: float, cached: float) -> list[str]:
    """One line for each limit of the case: pass or MISS, the measured time and the limit. Arguments are in seconds."""
    spec, target, _ = case
    limits = [("cold", cold, COLD_SECONDS.get((spec, target))), ("cached", cached, CACHED_SECONDS)]
    return [
        f"{'pass' if measured <= limit else 'MISS'}  {' '.join(case)}: "
        f"{kind} build {_shown(measured)}, at most {_shown(limit)}"
        for kind, measured, limit in limits
        if limit is not None
    ]


def _run(case: tuple[str, str, str], cache: str) -> dict[str, float]:
    environment = {**os.environ, "EMBFORGE_CACHE_DIR": cache}
    answer = subprocess.run(
        [sys.executable, "-c", WORK, *case], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(answer.stdout)
    return result


def _median(runs: list[dict[str, float]], field: str) -> float:
    return statistics.median(run[field] for run in runs)


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


if __name__ == "__main__":
    main()
