"""The hardware on which a time depends: this machine's CPU, or a GPU by facts from torch, which it never imports."""

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
"""Our names of caches, by Linux's names of their level and type."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def this_cpu() -> Hardware:
    """This machine's processor, as far as this process may use it; sizes that are not known are left out."""
    vendor, family, model = _apple_identity() if sys.platform == "darwin" else _linux_identity()
    identity = {"vendor": vendor, "family": family, "model": model, "simd": host_isa()}
    usable = _usable_cpus()
    caches = _apple_caches() if sys.platform == "darwin" else _linux_caches(min(usable))
    return Hardware("cpu", cpu_model(), identity, {"cores": min(len(usable), _thread_limit()), **caches})


def any_cpu(isa: str) -> Hardware:
    """A processor of which only the instruction set is known, for kernels that will run on another machine."""
    return Hardware("cpu", f"any {isa} CPU", {"simd": isa}, {})


def gpu_hardware(facts: Mapping[str, Any]) -> Hardware:
    """A GPU, described by `embforge.device_facts.gpu_facts`. Sizes that are not known are left out."""
    sizes = {name: facts.get(name) for name in ("multiprocessors", "l2_bytes", "memory_bytes")}
    known = {name: int(size) for name, size in sizes.items() if size}
    return Hardware("gpu", str(facts["name"]), {"arch": str(facts["arch"])}, known)


def any_gpu(arch: str) -> Hardware:
    """A GPU of which only the architecture is known, for kernels that will run on another machine."""
    return Hardware("gpu", f"any {arch} GPU", {"arch": arch}, {})


def parse_bytes(text: str) -> int:
    """The bytes of a size in Linux's form, e.g. 32768K; `ValueError` for other texts."""
    text = text.strip()
    return int(text.rstrip("KMG")) * UNITS.get(text[-1:], 1)


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _thread_limit() -> int:
    """The limit in OMP_NUM_THREADS, which torch obeys: a process of one thread is tuned as a machine of one core."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(limit) if limit.isdecimal() and int(limit) else sys.maxsize


@cache
def _linux_identity() -> tuple[str, str, str]:
    """Vendor, family and model of an x86 processor; for ARM the implementer, architecture and part."""
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
    """Sizes of the caches that one CPU uses."""
    sizes: dict[str, int] = {}
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            name = CACHES.get((level, kind))
            if name:
                sizes[name] = parse_bytes(size)
        except (OSError, ValueError):  # hidden by a container or a hypervisor: this size stays unknown
            continue
    return sizes


@cache
def _apple_identity() -> tuple[str, str, str]:
    vendor = _sysctl("machdep.cpu.vendor") or "Apple"
    family = _sysctl("machdep.cpu.family") or _sysctl("hw.cpufamily") or UNKNOWN
    return vendor, family, _sysctl("machdep.cpu.model") or _sysctl("machdep.cpu.brand_string") or UNKNOWN


@cache
def _apple_caches() -> dict[str, int]:
    """Sizes of the caches; those of the fast cores if there are two kinds of cores."""
    names = {"l1_bytes": "l1dcachesize", "l2_bytes": "l2cachesize", "l3_bytes": "l3cachesize"}
    reported = {name: _sysctl(f"hw.perflevel0.{key}") or _sysctl(f"hw.{key}") for name, key in names.items()}
    return {name: int(size) for name, size in reported.items() if size.isdigit() and int(size)}


def _sysctl(name: str) -> str:
    answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""
