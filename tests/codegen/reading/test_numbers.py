"""Numbers as people read them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embforge.codegen.reading.numbers import size

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1024, "1.02 kB", "1 KiB"),
        (-2048, "-2.05 kB", "-2 KiB"),
        (65000, "65 kB", "63.5 KiB"),
        (999_600, "1 MB", "976 KiB"),
        (1023 * 1024, "1.05 MB", "0.999 MiB"),
        (25_600_000, "25.6 MB", "24.4 MiB"),
        (1 << 25, "33.6 MB", "32 MiB"),
    ],
)
def test_sizes_in_decimal_and_binary_units(count: float, decimal: str, binary: str) -> None:
    assert (size(count), size(count, binary=True)) == (decimal, binary)


def test_sizes_are_spelled_one_way() -> None:
    """kB is 1000 bytes, KiB is 1024; KB would be either. Generated text keeps a comment, so that kernels stay."""
    pages = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"] + [*ROOT.glob("docs/*.md")]
    code = [path for folder in ("cli", "codegen", "runtime", "tuner") for path in (ROOT / folder).rglob("*.py")]
    for path in pages + code:
        assert not re.search(r"\bKB\b", path.read_text("utf-8")), path
