"""Errors for the bugs that the SIMT executor finds. They say where a bug is: kernel, block, thread, line, and the text
of the line."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from embforge.codegen.errors import KernelBugError
from embforge.launch.simt.abi import SimtPlace, SimtReport

MOST_FRAMES = 6
"""The most lines of a chain of inlined calls that are shown."""


class Frame(NamedTuple):
    """A function of the CUDA text, and the line in it that was being executed."""

    function: str
    file: str
    line: int


def bug_of(report: SimtReport, image: Path, source: str, seed: int) -> KernelBugError:
    """The error for a report. `source` is the CUDA text of the image, `seed` the seed of the launch's schedule."""
    message = report.message.decode(errors="replace")
    lines = [f"kernel {report.kernel.decode()}: {report.kind.decode()}: {message}"]
    lines += _place("", report.place, image, source)
    if report.has_other:
        lines += _place("earlier: ", report.other, image, source)
    lines.append(f"  schedule seed {seed}; the same seed gives the same schedule")
    return KernelBugError("\n".join(lines))


def _place(label: str, place: SimtPlace, image: Path, source: str) -> list[str]:
    thread = f"  {label}block {_index(place.block)}, thread {_index(place.thread)}"
    if not place.offset:
        return [thread]
    frames = frames_at(image, place.offset)
    if frames is None:
        return [
            f"{thread}, at {image} + {place.offset:#x} (the line is unknown: install addr2line, of GNU binutils, to "
            "see it)"
        ]
    own = [frame for frame in frames if frame.file.endswith(".cu")]
    if not own:
        return [f"{thread}, outside of the kernel's text, at {image} + {place.offset:#x}"]
    texts = source.split("\n")
    first, *callers = own
    text = texts[first.line - 1].strip() if 0 < first.line <= len(texts) else "?"
    shown = [f"{thread}, {first.file}:{first.line} in {first.function}", f"    {first.line} | {text}"]
    return shown + [f"    called in {f.function}, line {f.line}" for f in callers[: MOST_FRAMES - 1]]


def frames_at(image: Path, offset: int) -> list[Frame] | None:
    """The chain of inlined calls at an instruction, innermost first; None if no addr2line is installed."""
    program = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if program is None:
        return None
    command = [program, "-i", "-f", "-C", "-e", str(image), hex(offset)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    words = answer.stdout.splitlines()
    frames = []
    for function, place in zip(words[::2], words[1::2], strict=False):
        file, _, number = place.rpartition(":")
        line = re.match(r"\d+", number)
        frames.append(Frame(_short(function), Path(file).name, int(line[0]) if line else 0))
    return frames


def _short(function: str) -> str:
    """The name of a function without namespaces, template arguments and parameters."""
    name = function
    while (plain := re.sub(r"<[^<>]*>|\([^()]*\)( const)?", "", name)) != name:
        name = plain
    return name.split()[-1].rpartition("::")[2] if name.split() else function


def _index(words: Any) -> str:
    """The text of an index in three dimensions: (3, 0, 0) as 3, and (3, 1, 0) in full."""
    x, y, z = words
    return str(x) if y == z == 0 else f"({x}, {y}, {z})"
