"""The CPU's kernels under the compiler's own checks of memory and of undefined behaviour, on the conformance suites."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CHECKED = ("test_stages.py", "test_training_edges.py", "test_training_bits.py", "test_bits.py")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.soak
@pytest.mark.parametrize("suite", CHECKED)
def test_kernels_do_nothing_undefined(suite: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    assert all(os.path.isabs(path) for path in found), f"g++ has no sanitizers: {found}"
    environment = os.environ | {
        "CXX": f"{compiler} {FLAGS}",
        "LD_PRELOAD": " ".join(found),  # Python itself is not built with them
        "ASAN_OPTIONS": "detect_leaks=0",
        "EMBFORGE_TEST_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "sanitized"),
    }
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not soak"]
    words += ["-k", "cpu and not any_spec", f"conformance/{suite}"]
    answer = subprocess.run(words, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-8000:]
    assert " passed" in answer.stdout
