"""The list of seeded bugs fits the tree: the text of each bug is in its file, and its tests exist."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from seeded.listed import AREAS, ROOT, Bug, read_bugs

BUGS = read_bugs()
LEAST, LEAST_OF_AN_AREA = 40, 8
KEEPERS = ("codegen/cache.py", "codegen/build.py", "toolchain.py")
"""Files that find kernels by content. A bug in them could leave wrong kernels in the cache that all runs share."""
SEE_ANY_CHANGE = ("tests/codegen/test_golden.py", "tests/baseline/")
"""Tests that compare texts and digests with checked-in ones, and so do not know whether a template is wrong."""


def test_every_area_has_enough_bugs() -> None:
    areas = Counter(bug.area for bug in BUGS)
    assert set(areas) == set(AREAS) and min(areas.values()) >= LEAST_OF_AN_AREA and len(BUGS) >= LEAST
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_text_of_a_bug_is_in_its_file_once(bug: Bug) -> None:
    assert not bug.file.endswith(KEEPERS)
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    assert text.count(bug.old) == 1, f"{bug.file} changed: update this bug in bugs.toml"
    assert bug.new != bug.old
    if bug.file.endswith(".py"):
        ast.parse(text.replace(bug.old, bug.new))


@pytest.mark.parametrize("node", sorted({node for bug in BUGS for node in bug.caught_by.split()}))
def test_the_tests_of_a_bug_are_run_by_make_test(node: str) -> None:
    assert not node.startswith(SEE_ANY_CHANGE)
    path, _, name = node.partition("::")
    tests = {
        part.name: [ast.unparse(mark) for mark in part.decorator_list]
        for part in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")
    }
    assert "pytest.mark.soak" not in tests[name.partition("[")[0]]
