"""`embforge cache`: what the kernel cache holds, and how to empty it."""

from __future__ import annotations

import click

from embforge.codegen.cli.common import console, json_option, print_json


@click.group()
def cache() -> None:
    """The cache of compiled kernels (EMBFORGE_CACHE_DIR, else the platform's)."""


@cache.command("ls")
@json_option
def list_(as_json: bool) -> None:
    """List the kernels in the cache."""
    from embforge.codegen.cache import cache_dir, entries

    found = [
        {
            "uri": entry.directory.parent.name,
            "key": entry.directory.name,
            "directory": str(entry.directory),
            "bytes": entry.binary.stat().st_size,
        }
        for entry in entries()
    ]
    if as_json:
        print_json({"directory": str(cache_dir()), "kernels": found})
        return
    for kernel in found:
        click.echo(f"{kernel['bytes']:>10,}  {kernel['uri']}/{kernel['key']}")
    total = sum(int(str(kernel["bytes"])) for kernel in found)
    click.echo(f"{len(found)} kernels, {total:,} bytes of binaries in {cache_dir()}")


@cache.command()
@json_option
def clear(as_json: bool) -> None:
    """Remove every kernel from the cache; they are compiled again when needed."""
    from embforge.codegen.cache import cache_dir
    from embforge.codegen.cache import clear as clear_cache

    freed = clear_cache()
    if as_json:
        print_json({"directory": str(cache_dir()), "freed_bytes": freed})
    else:
        console().print(f"freed {freed:,} bytes in {cache_dir()}", soft_wrap=True)
