"""A pytest plugin that notes which lines of the launcher ran. `main` runs checks under it and prints what is missing.

Functions that are only a docstring (protocols) have no line that could run.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import embforge.launch

LAUNCH = Path(embforge.launch.__file__).parent
MODULES = tuple(
    f"{name}.py"
    for name in (
        "cuda/backward",
        "cuda/errors",
        "cuda/forward",
        "cuda/kernels",
        "cuda/watch",
        "gpu/backward_call",
        "gpu/forward_call",
    )
)


def executable_lines(path: Path) -> set[int]:
    """Lines that have code of their own."""
    text = path.read_text(encoding="utf-8")
    without = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings
            without.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return _lines(compile(text, str(path), "exec")) - without


def _lines(code: CodeType) -> set[int]:
    found = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _lines(constant)
    return found


class Lines:
    """Which lines of some files ran, from the moment it is made."""

    def __init__(self, paths: list[Path]) -> None:
        self._names = {str(path) for path in paths}
        self.ran: dict[str, set[int]] = defaultdict(set)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._names else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.ran[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line


def main(words: list[str]) -> int:
    """Runs `pytest WORDS`, then prints per module how many lines ran and which did not. Returns pytest's exit code."""
    paths = [LAUNCH / name for name in MODULES]
    lines = Lines(paths)
    code = int(pytest.main(words))
    sys.settrace(None)
    for path in paths:
        wanted = executable_lines(path)
        missing = wanted - lines.ran[str(path)]
        print(f"covered\t{path.relative_to(LAUNCH)}\t{len(wanted - missing)}\t{len(wanted)}\t{sorted(missing)}")
    return code
