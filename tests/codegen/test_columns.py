"""Generated text in columns."""

from __future__ import annotations

import pytest

from embforge.codegen.columns import aligned_comments, aligned_rows


def test_comments_after_code_begin_in_one_column() -> None:
    text = "int a;  // x\n    // alone\nint longer;  // http://y  // z\nint bare;\n"
    assert aligned_comments(text) == (
        "int a;       // x\n"
        "    // alone\n"
        "int longer;  // http://y  // z\n"
        "int bare;\n"
    )  # fmt: skip
    assert aligned_comments("") == ""


def test_fields_of_rows_stand_below_their_names() -> None:
    text = (
        "    // table, pooling, column, hotness\n"
        "    {0, Pooling::divided, -1, 0},  // a\n"
        "    {10, Pooling::summed, 1110, 3},  // bb\n"
        "    {12, 0, 5, 0},\n"
    )
    assert aligned_rows(text) == (
        "    // table, pooling,          column, hotness\n"
        "    {      0, Pooling::divided,     -1,       0},  // a\n"
        "    {     10, Pooling::summed,    1110,       3},  // bb\n"
        "    {     12, 0,                     5,       0},\n"
    )
    assert aligned_rows("// f, g\n{a<b>, cd},  // x\n{e, f},  // y\n") == (
        "// f,  g\n"
        "{a<b>, cd},  // x\n"
        "{e,    f},   // y\n"
    )  # fmt: skip


def test_a_row_without_a_field_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        aligned_rows("// a, b\n{1, 2},\n{3},\n")
