"""`make lint` refuses private names of other modules in product code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = """\
from embforge.training.trainer import _secret


def taken(module: object) -> tuple[object, object]:
    return _secret, module._secret
"""


@pytest.mark.parametrize("folder", ["cli", "codegen", "runtime", "runtime/sharded/stages", "tuner", "benchmarks"])
def test_private_names_of_other_modules_are_refused(folder: str) -> None:
    assert _found_in(f"{folder}/planted.py") == ["PLC2701", "SLF001"]


def test_tests_may_use_private_names() -> None:
    assert _found_in("tests/runtime/planted.py") == []


def _found_in(file: str) -> list[str]:
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--stdin-filename", file, "-"]
    checked = subprocess.run(command, cwd=ROOT, input=PLANTED, capture_output=True, text=True, timeout=60)
    return sorted(violation["code"] for violation in json.loads(checked.stdout))
