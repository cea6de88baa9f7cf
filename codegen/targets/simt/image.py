"""Turns CUDA text into the C++ source of a SIMT image: the same lines, except for what only a GPU understands.

Any CUDA text will do, generated or written by hand. Every line outside of the primitives section keeps its file name
and number, so that lines named by the executor or by a compiler are lines of the text that NVRTC compiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from embforge.codegen.render import render

PRIMITIVES = ("// ==== primitives", "// ==== end of primitives")
"""The lines around the section that the executor replaces by its own `primitives.h`, if the text has one."""
MOST_THREADS = "1024"
"""The most threads per block of a kernel without launch bounds."""

_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
_STEP = re.compile(
    r"namespace\s+(?P<namespace>[\w:]+)\s*\{|(?P<open>\{)|(?P<close>\})|(?P<template>template\s*<)|__global__"
)
_KERNEL = re.compile(
    r"[\w\s*]*?(?:__launch_bounds__\s*(?P<bounds>\((?:[^()]|\([^()]*\))*\))[\w\s*]*?)?\b(?P<name>\w+)\s*\("
)


@dataclass(frozen=True)
class KernelText:
    """A `__global__` function in a text."""

    name: str
    namespace: str
    """`embforge`, `a::b` or empty."""
    max_threads: str
    """The first of its launch bounds: a C++ expression that is valid in its namespace."""

    @property
    def qualified(self) -> str:
        return f"{self.namespace}::{self.name}"


def kernels_in(text: str) -> tuple[KernelText, ...]:
    """The kernels that a text defines, in its order. Templates do not count: they cannot be launched by name."""
    code = _NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    scopes: list[str | None] = []
    kernels: dict[str, KernelText] = {}
    is_template = False
    for step in _STEP.finditer(code):
        if step["namespace"]:
            scopes.append(step["namespace"])
        elif step["open"]:
            scopes.append(None)
        elif step["close"]:
            del scopes[-1:]
        elif not step["template"]:
            kernel = _KERNEL.match(code, step.end())
            if kernel and not is_template:
                namespace = "::".join(scope for scope in scopes if scope)
                bounds = kernel["bounds"]
                threads = _first_argument(bounds[1:-1]) if bounds else MOST_THREADS
                kernels[kernel["name"]] = KernelText(kernel["name"], namespace, threads)
        is_template = bool(step["template"])
    return tuple(kernels.values())


def image_source(text: str, name: str, arch: str) -> str:
    """The C++ source of an image. `name`: the name of the file that messages about its lines give, e.g. `<uri>.cu`."""
    lines, (begin, end) = text.split("\n"), _primitives(text)
    facts = {
        "name": name,
        "arch": arch,
        "before": "\n".join(lines[:begin]),
        "has_primitives": end > begin,
        "line_after": end + 1,
        "after": "\n".join(lines[end:]),
        "kernels": kernels_in(text),
    }
    return render("emulator/image.cpp.j2", facts)


def device_code(text: str) -> str:
    """The text without its head comment and its primitives: all that the executor runs."""
    begin, end = _primitives(text)
    lines = text.split("\n")
    return "\n".join(lines[end:] if end > begin else lines)


def _primitives(text: str) -> tuple[int, int]:
    """The first line of the section and the line after it, counted from 0. If there is no section, both are after the
    last line."""
    lines = text.split("\n")
    begin, end = (next((i for i, line in enumerate(lines) if line.startswith(m)), len(lines)) for m in PRIMITIVES)
    return (begin, end + 1) if end < len(lines) else (len(lines), len(lines))


def _first_argument(arguments: str) -> str:
    depth = 0
    for index, letter in enumerate(arguments):
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            return arguments[:index].strip()
    return arguments.strip()
