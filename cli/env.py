"""`embforge env`: the facts about the machine that a bug report needs."""

from __future__ import annotations

from typing import Any

import click

from embforge.cli.common import console, json_option, print_json

PACKAGES = (
    "embforge",
    "torch",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cuobjdump",
    "nvidia-cuda-nvdisasm",
    "jinja2",
    "numpy",
    "pydantic",
    "fbgemm-gpu-cpu",
)
SETTINGS = (
    "EMBFORGE_CACHE_DIR",
    "EMBFORGE_TUNED_DIR",
    "EMBFORGE_SHIPPED_DIR",
    "EMBFORGE_STUDIES",
    "EMBFORGE_KERNELS",
    "EMBFORGE_JIT",
    "EMBFORGE_QUIET",
    "CXX",
)


@click.command(short_help="Show facts about this machine for a bug report.")
@json_option
def env(as_json: bool) -> None:
    """Show versions, compilers, the instruction set, caches and GPUs of this machine."""
    facts = collect()
    if as_json:
        print_json(facts)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, items in facts.items():
        for number, (label, value) in enumerate(items.items()):
            shown = "not installed" if value is None and section == "packages" else "-" if value is None else str(value)
            table.add_row(f"[bold]{section}[/]" if number == 0 else "", label, Text(shown))
    console().print(table)


def collect() -> dict[str, dict[str, Any]]:
    """Facts about the machine and the installation, by section."""
    import os
    import platform

    from embforge.codegen import machine
    from embforge.codegen.cache import cache_dir
    from embforge.codegen.errors import CacheError, ToolchainError

    try:
        compiler = machine.find_compiler()
        cxx: dict[str, Any] = {"path": compiler.path, "version": compiler.version}
    except ToolchainError as error:
        cxx = {"path": None, "version": str(error)}
    try:
        cache = str(cache_dir())
    except CacheError as error:
        cache = str(error)
    return {
        "system": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "processor": machine.cpu_model(),
            "cpus": os.cpu_count(),
            "isa": machine.host_isa(),
        },
        "c++": cxx,
        "packages": {name: machine.package_version(name) for name in PACKAGES},
        "gpus": _gpus(),
        "cache": {"directory": cache},
        "tuned": _tuned(),
        "settings": {name: os.environ.get(name) for name in SETTINGS},
    }


def _tuned() -> dict[str, str]:
    """Directory and number of results of each store of tuned results, with the current directory as the project."""
    from embforge.codegen.tuned.stores import read_store, store_dirs

    stores: dict[str, str] = {}
    for name, directory in store_dirs().items():
        results, problems = read_store(name, directory)
        skipped = f", {len(problems)} skipped" if problems else ""
        stores[name] = f"{directory} ({len(results)} results{skipped})"
    return stores


def _gpus() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"count": 0}
    names = {}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names[f"device {index}"] = f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
    return {"count": len(names), **names}
