"""Renders the source of a plan. Templates print facts; the target's `facts` makes all decisions."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket

from embforge.codegen.cache import cache_dir, write_atomically
from embforge.codegen.columns import aligned_comments, aligned_rows

DIGEST_BYTES = hashlib.sha256().digest_size


class _TemplateCache(BytecodeCache):
    """A cache of templates as Python bytecode, in the kernel cache and by content like it.

    Translating the templates takes longer than everything else between a spec and its cached kernel. A file begins
    with the hash of what follows, because Python does not survive damaged bytecode: a file that does not match is
    translated again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load_bytecode(self, bucket: Bucket) -> None:
        path = self._path(bucket)
        try:
            data = path.read_bytes() if path.is_file() else b""
        except OSError:  # it cannot be read: the template is translated again
            return
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = bucket.bytecode_to_string()
        with suppress(OSError):  # a cache that cannot be written costs time, not the answer
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(bucket), hashlib.sha256(code).digest() + code)

    def _path(self, bucket: Bucket) -> Path:
        return self.directory / f"{bucket.key}.bytecode"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("embforge.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_TemplateCache(cache_dir() / "templates"),
    )
    environment.filters |= {"aligned_comments": aligned_comments, "aligned_rows": aligned_rows}
    return environment


def render(template: str, facts: dict[str, Any]) -> str:
    """The template filled with facts. A fact that the template uses but `facts` does not have is an error."""
    return _environment().get_template(template).render(facts)
