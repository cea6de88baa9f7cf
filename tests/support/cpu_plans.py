"""Plans of CPU kernels, their machine code, and the tasks that they start."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from embforge.codegen.build import source_of
from embforge.codegen.machine import find_compiler, host_isa
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of
from embforge.verify.lookups import torch_threads

BODY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


PARALLEL_FOR = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, BODY, ctypes.c_void_p)


def forward(spec: CollectionSpec, isa: str = host_isa(), **fields: Any) -> Plan:
    return Plan("forward", "cpu", isa, "int64", spec, CpuParams(**fields))


def one_table(dim: int, rows: int = 100_000, pooling: str = "sum", output_dtype: str = "fp32") -> CollectionSpec:
    return CollectionSpec([TableSpec("t", rows, dim)], [FeatureSpec("f", "t", pooling)], output_dtype)


@contextmanager
def counted_tasks(kernel: Any) -> Iterator[list[int]]:
    """Records how many tasks each of the kernel's parallel loops starts."""
    counts = []

    def run(begin: int, end: int, grain: int, body: Callable[..., None], context: Any) -> int:
        counts.append(end - begin)
        body(begin, end, context)
        return 0

    callback = PARALLEL_FOR(run)
    with torch_threads(3), pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "_parallel_for", ctypes.cast(callback, ctypes.c_void_p).value)
        yield counts


def machine_code(plan: Plan, scratch: Path) -> bytes:
    """The machine code of the plan's source, compiled under a name that is the same for all plans."""
    source, compiled, text = (scratch / f"kernel.{suffix}" for suffix in ("cpp", "o", "text"))
    source.write_text(source_of(plan).replace(plan.uri, "kernel"))
    flags = [flag for flag in FLAGS if flag != "-shared"]
    subprocess.run([*find_compiler().command, *flags, *isa_of(plan).flags, "-c", source, "-o", compiled], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", compiled, text], check=True)
    return text.read_bytes()
