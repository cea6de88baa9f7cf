"""What a time depends on: this machine's processor, or a GPU by the facts that torch has of it. Never imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from embforge.codegen.machine import cpu_model, host_isa
from embforge.codegen.tuned.record import Hardware

UNKNOWN = "unknown"
CACHES = {("1", "Data"): "l1_bytes", ("1", "Unified"): "l1_bytes", ("2", "Unified"): "l2_bytes"}
CACHES |= {("3", "Unified"): "l3_bytes"}
"""From what Linux calls a cache's level and type to what we do."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def this_cpu() -> Hardware:
    """This machine's processor as this process may use it; sizes that the system does not tell are left out."""
    vendor, family, model = _apple_identity() if sys.platform == "darwin" else _linux_identity()
    identity = {"vendor": vendor, "family": family, "model": model, "simd": host_isa()}
    usable = _usable_cpus()
    caches = _apple_caches() if sys.platform == "darwin" else _linux_caches(min(usable))
    return Hardware("cpu", cpu_model(), identity, {"cores": min(len(usable), _thread_limit()), **caches})


def any_cpu(isa: str) -> Hardware:
    """A processor of which only the instruction set is known: what kernels for another machine are made for."""
    return Hardware("cpu", f"any {isa} CPU", {"simd": isa}, {})


def gpu_hardware(facts: Mapping[str, Any]) -> Hardware:
    """A GPU by what `embforge.device.gpu_facts` says of it; sizes that it does not know are left out."""
    sizes = {name: facts.get(name) for name in ("multiprocessors", "l2_bytes", "memory_bytes")}
    known = {name: int(size) for name, size in sizes.items() if size}
    return Hardware("gpu", str(facts["name"]), {"arch": str(facts["arch"])}, known)


def any_gpu(arch: str) -> Hardware:
    """A GPU of which only the architecture is known."""
    return Hardware("gpu", f"any {arch} GPU", {"arch": arch}, {})


def parse_bytes(text: str) -> int:
    """A size as Linux writes it: 32768K. `ValueError` for anything else."""
    text = text.strip()
    return int(text.rstrip("KMG")) * UNITS.get(text[-1:], 1)


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _thread_limit() -> int:
    """What OMP_NUM_THREADS allows, which torch obeys: a process of one thread is tuned as a machine of one core."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(told) if told.isdecimal() and int(told) else sys.maxsize


@cache
def _linux_identity() -> tuple[str, str, str]:
    """Vendor, family and model as x86 calls them; on ARM the implementer, architecture and part."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        label, _, value = line.partition(":")
        facts.setdefault(label.strip(), value.strip())
    names = (("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part"))
    vendor, family, model = (next((facts[n] for n in pair if facts.get(n)), UNKNOWN) for pair in names)
    return vendor, family, model if facts else platform.machine()


@cache
def _linux_caches(cpu: int) -> dict[str, int]:
    """Sizes of the caches that one CPU sees."""
    found: dict[str, int] = {}
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            name = CACHES.get((level, kind))
            if name:
                found[name] = parse_bytes(size)
        except (OSError, ValueError):  # a container or a hypervisor hides it: one size less is known
            continue
    return found


@cache
def _apple_identity() -> tuple[str, str, str]:
    vendor = _sysctl("machdep.cpu.vendor") or "Apple"
    family = _sysctl("machdep.cpu.family") or _sysctl("hw.cpufamily") or UNKNOWN
    return vendor, family, _sysctl("machdep.cpu.model") or _sysctl("machdep.cpu.brand_string") or UNKNOWN


@cache
def _apple_caches() -> dict[str, int]:
    """Of the fast cores, where there are two kinds."""
    names = {"l1_bytes": "l1dcachesize", "l2_bytes": "l2cachesize", "l3_bytes": "l3cachesize"}
    told = {name: _sysctl(f"hw.perflevel0.{key}") or _sysctl(f"hw.{key}") for name, key in names.items()}
    return {name: int(size) for name, size in told.items() if size.isdigit() and int(size)}


def _sysctl(name: str) -> str:
    answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""
