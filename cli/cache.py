"""`embforge cache`: what the kernel cache holds, and how to empty it."""

from __future__ import annotations

from pathlib import Path

import click

from embforge.cli.common import console, json_option, print_json


@click.group()
def cache() -> None:
    """The cache of compiled kernels (EMBFORGE_CACHE_DIR, else the platform's)."""


@cache.command("ls")
@json_option
def list_(as_json: bool) -> None:
    """List the kernels in the cache."""
    from embforge.codegen.cache import entries

    directory = _directory()
    found = [
        {
            "uri": entry.directory.parent.name,
            "key": entry.directory.name,
            "directory": str(entry.directory),
            "bytes": entry.binary.stat().st_size,
        }
        for entry in entries(directory)
    ]
    if as_json:
        print_json({"directory": str(directory), "kernels": found})
        return
    for kernel in found:
        click.echo(f"{kernel['bytes']:>10,}  {kernel['uri']}/{kernel['key']}")
    total = sum(int(str(kernel["bytes"])) for kernel in found)
    click.echo(f"{len(found)} kernels, {total:,} bytes of binaries in {directory}")


@cache.command()
@json_option
def clear(as_json: bool) -> None:
    """Remove every kernel from the cache; they are compiled again when needed."""
    from embforge.codegen.cache import clear as clear_cache

    directory = _directory()
    freed = clear_cache(directory)
    if as_json:
        print_json({"directory": str(directory), "freed_bytes": freed})
    else:
        console().print(f"freed {freed:,} bytes in {directory}", soft_wrap=True)


def _directory() -> Path:
    from embforge.codegen.cache import cache_dir
    from embforge.codegen.errors import CacheError

    directory = cache_dir()
    if directory.exists() and not directory.is_dir():
        raise CacheError(f"the cache {directory} is not a directory; point EMBFORGE_CACHE_DIR to one")
    return directory
