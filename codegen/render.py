"""Plan -> source text. Templates state facts; what they say is decided in the target's `facts`."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket

from embforge.codegen.cache import cache_dir


class _TemplateCache(FileSystemBytecodeCache):
    """Templates as Python bytecode, beside the kernels and like them by content.

    Translating the templates takes longer than everything else between a spec and its cached kernel.
    """

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):  # a cache that cannot be written costs time, not the answer
            super().dump_bytecode(bucket)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("embforge.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_template_cache(),
    )


def _template_cache() -> _TemplateCache:
    directory = cache_dir() / "templates"
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return _TemplateCache(str(directory))


def render(template: str, facts: dict[str, Any]) -> str:
    """The template filled with facts; a fact that the template names and nobody gave is an error."""
    return _environment().get_template(template).render(facts)
