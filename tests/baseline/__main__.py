"""`python -m baseline check|write`: compares all digests with the checked-in ones, or replaces those.

    PYTHONPATH=tests python -m baseline check [--only results|code] [--case TEXT]
    PYTHONPATH=tests python -m baseline write [--only results|code] [--new]

`write --new` adds the digests of cases that have none, and leaves the others as they are. Ends with 1 if anything
differs. Machine code is compared where the compilers are those of the file.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time

from baseline.catalogue import result_cases
from baseline.code_cases import COMPILERS, code_cases
from baseline.digests import Digests
from baseline.recorded import FILE, Recorded, differences, message, read_recorded


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m baseline", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("action", choices=["check", "write"])
    parser.add_argument("--only", choices=["results", "code"], help="only this part")
    parser.add_argument("--case", default="", help="check only cases whose name contains this")
    parser.add_argument("--new", action="store_true", help="write only cases that have no digest yet")
    words = parser.parse_args()
    if words.action == "write" and words.case:
        parser.error("write writes all cases")
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as nothing
    ):  # an empty store: results must not depend on what was tuned on this machine
        os.environ.update(EMBFORGE_TUNED_DIR=nothing, EMBFORGE_SHIPPED_DIR=nothing, EMBFORGE_QUIET="1")
        os.environ.pop("EMBFORGE_KERNELS", None)
        failed = _write(words.only, words.new) if words.action == "write" else _check(words.only, words.case)
    cpu = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    print(f"{time.monotonic() - start:.0f} s, {cpu:.0f} s of CPU time")
    return int(failed)


def _check(only: str | None, text: str) -> bool:
    recorded, failed, count = read_recorded(), False, 0

    def compare(case: str, before: Digests, found: Digests) -> None:
        nonlocal failed, count
        count += 1
        if lines := differences(before, found):
            failed = True
            print(message(case, lines), flush=True)

    if only != "code":
        for case in (case for case in result_cases() if text in case.name):
            for backend in case.backends:
                compare(f"{case.name} on {backend}", recorded.results.get(case.name, {}), case.digests(backend))
    if only != "results":
        for target, compiler in COMPILERS.items():
            if compiler() != recorded.compilers[target]:
                print(f"machine code of {target} left out: {compiler()}, recorded by {recorded.compilers[target]}")
                continue
            for code in (case for case in code_cases() if case.target == target and text in case.name):
                compare(code.name, recorded.code.get(code.name, {}), code.digests())
    print(f"{count} comparisons; {'differences above' if failed else f'all as in {FILE.name}'}")
    return failed


def _write(only: str | None, new: bool) -> bool:
    before = read_recorded() if only or new else Recorded({}, {}, {})
    compilers, code, results = before.compilers, before.code, before.results
    if only != "code":
        results = dict(results) if new else {}
        for case in (case for case in result_cases() if case.name not in results):
            for backend in case.backends:
                found = case.digests(backend)
                if lines := differences(results.setdefault(case.name, found), found):
                    print(message(f"{case.name} on {backend}, compared with {case.backends[0]}", lines))
                    return True
            print(case.name, flush=True)
    if only != "results":
        now = {target: compiler() for target, compiler in COMPILERS.items()}
        if new and now != compilers:
            print(
                f"these compilers are {now}, the file's {compilers}: write all digests of machine code, without --new"
            )
            return True
        code, compilers = dict(code) if new else {}, now
        for kernels in [kernels for kernels in code_cases() if kernels.name not in code]:
            code[kernels.name] = kernels.digests()
            print(kernels.name, flush=True)
    FILE.write_text(Recorded(compilers, code, results).to_json(), encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size} bytes")
    return False


if __name__ == "__main__":
    sys.exit(main())
