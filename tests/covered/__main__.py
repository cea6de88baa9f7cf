"""`python -m covered`: which lines of product code and which templates the tests of `make test` reach.

    PYTHONPATH=tests python -m covered [--missing] [WORDS FOR PYTEST ...]

Every process that a test starts is measured. Ranks and judges that tests kill leave no record, so the figures are
lower bounds. It needs the package coverage, which `make coverage` installs. The exit code is that of pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import NoSource

ROOT = Path(__file__).parents[2]
CODE = ("cli", "codegen", "runtime", "tuner")
TEMPLATES = ROOT / "templates"
TESTS = ("-n", "2", "--dist", "worksteal", "-m", "not soak")
SETTINGS = """
[run]
data_file = {data}
source =
    {source}
parallel = true
sigterm = true
patch =
    subprocess
    fork
    _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""


def main() -> int:
    """Runs the tests and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m covered", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="list the lines that no test reached, file by file")
    words, chosen = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="covered-") as scratch:
        settings = Path(scratch, "coverage.ini")
        folders = "\n    ".join(str(ROOT / folder) for folder in (*CODE, TEMPLATES.name))
        settings.write_text(SETTINGS.format(data=Path(scratch, "data"), source=folders), encoding="utf-8")
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *TESTS, *chosen]
        # A template that is in the cache is not translated, so it would not be counted: the cache must be empty.
        environment = os.environ | {"EMBFORGE_TEST_CACHE_DIR": str(Path(scratch, "kernels"))}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        coverage = Coverage(config_file=str(settings))
        coverage.combine([scratch])
        for line in _code_table(coverage, words.missing):
            print(line)
        for line in _template_list(coverage):
            print(line)
    return code


def _code_table(coverage: Coverage, missing: bool) -> Iterator[str]:
    """How many statements each folder has and how many of them a test reached; with `missing`, the others by line."""
    statements: dict[str, int] = defaultdict(int)
    reached: dict[str, int] = defaultdict(int)
    for path in sorted(path for folder in CODE for path in _files(ROOT / folder, ".py")):
        try:
            _, lines, _, left, text = coverage.analysis2(str(path))
        except NoSource:
            continue
        folder = path.relative_to(ROOT).parts[0]
        statements[folder] += len(lines)
        reached[folder] += len(lines) - len(left)
        if missing and left:
            yield f"{path.relative_to(ROOT)}: {text}"
    yield f"{'folder':10} {'statements':>10} {'reached':>8}"
    for folder in CODE:
        yield f"{folder:10} {statements[folder]:10} {_percent(reached[folder], statements[folder]):>8}"
    total, all_reached = sum(statements.values()), sum(reached.values())
    yield f"{'all':10} {total:10} {_percent(all_reached, total):>8}"


def _template_list(coverage: Coverage) -> Iterator[str]:
    """How many templates were filled in; Jinja's code carries the name of its template's file."""
    measured = {Path(name).resolve() for name in coverage.get_data().measured_files()}
    templates = _files(TEMPLATES, ".j2")
    left = [str(path.relative_to(TEMPLATES)) for path in templates if path not in measured]
    yield f"{len(templates) - len(left)} of {len(templates)} templates were filled in"
    yield from (f"not filled in: {name}" for name in left)


def _files(folder: Path, suffix: str) -> list[Path]:
    """Files of a folder, without those that links in it lead to."""
    return sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(suffix))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
