"""The log of a compiler, with the lines of the source that it names."""

from __future__ import annotations

import re


def numbered_log(log: str, source: str, file: str = "", context: int = 2) -> str:
    """The compiler's log, followed by the numbered lines of the source that it names.

    `file`: the source's name in the log, if the log also names other files.
    """
    lines = source.splitlines()
    numbers = re.findall(re.escape(file) + r"[:(](\d+)[:)]", log)
    named = sorted({int(n) for n in numbers if 0 < int(n) <= len(lines)})
    shown = sorted({k for n in named for k in range(max(1, n - context), min(len(lines), n + context) + 1)})
    excerpt = "\n".join(f"{'>' if k in named else ' '} {k:5d} | {lines[k - 1]}" for k in shown)
    return f"{log.strip()}\n\n{excerpt}".rstrip()
