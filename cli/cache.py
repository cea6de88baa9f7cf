"""`embforge cache`: what the kernel cache holds, and how to empty it."""

from __future__ import annotations

from pathlib import Path

import click

from embforge.cli.common import console, json_option, print_json


@click.group(short_help="List or empty the cache of compiled kernels.")
def cache() -> None:
    """List or empty the cache of compiled kernels: EMBFORGE_CACHE_DIR, or by default the platform's cache directory."""


@cache.command("ls")
@json_option
def list_(as_json: bool) -> None:
    """List the kernels in the cache."""
    from embforge.codegen.cache import entries

    directory = _directory()
    kernels = [
        {
            "uri": entry.directory.parent.name,
            "key": entry.directory.name,
            "directory": str(entry.directory),
            "bytes": entry.binary.stat().st_size,
        }
        for entry in entries(directory)
    ]
    if as_json:
        print_json({"directory": str(directory), "kernels": kernels})
        return
    from rich.table import Table

    from embforge.codegen.reading.numbers import size

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for kernel in kernels:
        table.add_row(size(int(str(kernel["bytes"]))), f"{kernel['uri']}\n{kernel['key']}")
    if kernels:
        console().print(table, markup=False)
    total = size(sum(int(str(kernel["bytes"])) for kernel in kernels))
    console().print(f"{len(kernels)} kernels, {total} of binaries in {directory}", markup=False)


@cache.command(short_help="Remove every kernel from the cache.")
@json_option
def clear(as_json: bool) -> None:
    """Remove every kernel from the cache; they are compiled again when needed."""
    from embforge.codegen.cache import clear as clear_cache

    directory = _directory()
    freed = clear_cache(directory)
    if as_json:
        print_json({"directory": str(directory), "freed_bytes": freed})
    else:
        from embforge.codegen.reading.numbers import size

        console().print(f"freed {size(freed)} in {directory}", markup=False)


def _directory() -> Path:
    from embforge.codegen.cache import cache_dir
    from embforge.codegen.errors import CacheError

    directory = cache_dir()
    if directory.exists() and not directory.is_dir():
        raise CacheError(f"the cache {directory} is not a directory; set EMBFORGE_CACHE_DIR to one")
    return directory
