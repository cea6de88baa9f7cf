"""`python -m benchmarks.lines` counts statements and lines of templates correctly."""

from __future__ import annotations

from benchmarks.lines import count, files_of, source_lines, statements

PYTHON = '''
"""A module's docstring."""
class Data:
    """A class's docstring."""
    field: int = 0
    """A field's docstring."""

def double(number):  # a comment
    if number: return 2 * number
    return (
        0
    )
'''
TEMPLATE = """{# a comment
   of two lines #}
// nothing but a comment

int twice(int x) {  // after code
    /* before it */ return {{ factor }} * x;
}
const char* url = "https://example.org";
"""


def test_statements_are_counted_without_docstrings() -> None:
    assert statements(PYTHON) == 6  # class, field, def, if, return, return


def test_lines_are_counted_without_comments_and_blanks() -> None:
    assert source_lines(TEMPLATE) == 4


def test_a_total_is_the_sum_of_its_folders() -> None:
    files = [("room/a.py", "x = 1\ny = 2"), ("room/inner/deep/b.py", "z = 3"), ("room/inner/c.h", "int i;\n\n")]
    assert count(iter(files)) == {
        ("room", "statements"): 3,
        ("room/inner", "statements"): 1,
        ("room", "template lines"): 1,
        ("room/inner", "template lines"): 1,
        ("all", "statements"): 3,
        ("all", "template lines"): 1,
    }


def test_the_working_tree_is_read_without_what_is_generated() -> None:
    names = {name for name, _ in files_of(None)}
    assert {"benchmarks/lines.py", "templates/cpu/forward/forward.cpp.j2"} <= names
    assert not any(name.startswith("generated/") or "/fixtures/" in name for name in names)
