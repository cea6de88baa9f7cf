"""The resources of the kernels in a cubin: registers, shared memory, occupancy, local memory, bytes in flight.

They are read from the machine code, not from what the compiler was asked for. This is slow, because it runs two tools,
so only manifests have it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embforge.codegen.errors import ToolchainError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda import resolve, stages
from embforge.codegen.targets.cuda.arch import arch_named, resident_threads
from embforge.codegen.targets.cuda.backward_geometry import backward_params, row_buckets
from embforge.codegen.targets.cuda.geometry import BIG_ROW, cuda_params, geometry_of
from embforge.codegen.targets.cuda.launch import shape_of
from embforge.codegen.targets.cuda.long_bags import long_geometry
from embforge.codegen.targets.cuda.packages import INSTALL, cuda_module

LOAD_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "U8": 1}
LOAD_FUNCTION, LOAD_FUNCTION_LINES = "void load_row(", 7
CALLS = re.compile(r"\b(?:pool_run|copy_rows|pool_chunk|sum_chunks|update_rows|write_rows|multiply)<(\w+)>")
LINE = re.compile(r'//## File "[^"]*", line (\d+)')
FUNCTION = re.compile(r"^\.text\.(\w+):")
LABEL = re.compile(r"^\s*\.L\w*:")
ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "BAR", "WARPSYNC", "BSYNC")
"""Instructions after which loads are not counted together with those before, because others may come between them."""
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*)")


@dataclass
class LoadGroup:
    """Row loads that are all in flight before any of their results is used."""

    struct: str | None
    """The bucket (or kind of long bag) whose loop the loads are in, by its name in the source."""
    widths: list[int] = field(default_factory=list)
    registers: set[int] = field(default_factory=set)


@dataclass
class KernelCode:
    """One kernel's machine code, counted."""

    local_instructions: int = 0
    local_store_bytes: int = 0
    groups: list[LoadGroup] = field(default_factory=list)


def kernel_resources(plan: KernelPlan, source: str, binary: bytes) -> list[dict[str, Any]]:
    """The resources of each kernel, and what it keeps in flight. `source` is the text that the binary was made from.

    `bytes_in_flight`: bytes that are loaded before the first use of a result, times the threads that a multiprocessor
    holds and that have a row to load; the least over the loops of buckets whose rows have 64 bytes or more, None if
    there is no such loop.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(binary)
        usage = dict(_usage(_run("cuobjdump", "-res-usage", str(path))))
        code = read_code(_run("nvdisasm", "-c", "-gi", str(path)), source)
    return [_figures(plan, symbol, *usage[symbol], code[symbol]) for symbol in sorted(usage)]


def read_code(sass: str, source: str) -> dict[str, KernelCode]:
    """What a disassembly with line information has for each kernel.

    A row load is a load that comes from a `load_row` of the source. Its bucket is named in the call whose loop was
    inlined.
    """
    lines = source.splitlines()
    starts = [number for number, line in enumerate(lines, 1) if LOAD_FUNCTION in line]
    load_lines = {start + k for start in starts for k in range(LOAD_FUNCTION_LINES)}
    kernels: dict[str, KernelCode] = {}
    kernel = KernelCode()
    chain: list[int] = []  # source lines of the next instructions, innermost first
    ended = False
    group: LoadGroup | None = None
    for text in sass.splitlines():
        if match := FUNCTION.match(text):
            kernel, chain, group = kernels.setdefault(match[1], KernelCode()), [], None
        elif match := LINE.search(text):
            chain = [int(match[1])] if ended else [*chain, int(match[1])]
            ended = False
        elif match := INSTRUCTION.match(text):
            ended = True
            opcode, operands = match[2], match[3]
            if opcode.startswith(("LDL", "STL")):
                kernel.local_instructions += 1
                kernel.local_store_bytes += _width(opcode) if opcode.startswith("STL") else 0
            if opcode.startswith("LDG") and chain and chain[0] in load_lines:
                struct = next((c[1] for n in chain if (c := CALLS.search(lines[n - 1]))), None)
                results = _results(opcode, operands)
                if group is None or group.struct != struct or results & group.registers:
                    group = LoadGroup(struct)
                    kernel.groups.append(group)
                group.widths.append(_width(opcode))
                group.registers |= results
            elif group and (_touched(operands) & group.registers or opcode.startswith(ENDS)):
                group = None
        elif LABEL.match(text):
            group = None
    return kernels


def _figures(plan: KernelPlan, symbol: str, registers: int, shared: int, code: KernelCode) -> dict[str, Any]:
    arch, threads = arch_named(plan.arch), _threads(plan)
    shared -= arch.shared_reserved if arch.number >= 90 and shared else 0  # cuobjdump counts it from sm_90 on
    use: dict[str | None, tuple[int, float]] = {None: (0, 1.0)}
    if isinstance(plan, Plan) and plan.op.startswith("forward"):
        shared += shape_of(plan).shared_of(symbol)
        use |= _use(plan)
    elif isinstance(plan, Plan) and plan.op != "resolve":
        use |= _backward_use(plan)
    resident = resident_threads(arch, threads, registers, shared)
    in_flight = [(g, round(sum(g.widths) * resident * use[g.struct][1])) for g in code.groups]
    return {
        "symbol": symbol,
        "registers": registers,
        "spill_bytes": code.local_store_bytes,
        "local_instructions": code.local_instructions,
        "shared_bytes": shared,
        "occupancy": round(resident / arch.threads, 3),
        "bytes_in_flight": min((n for g, n in in_flight if use[g.struct][0] >= BIG_ROW), default=None),
        "loads": [
            {"bucket": g.struct, "load_bytes": min(g.widths), "loads": len(g.widths), "bytes": n} for g, n in in_flight
        ],
    }


def _threads(plan: KernelPlan) -> int:
    """Threads per block."""
    if not isinstance(plan, Plan):
        return stages.THREADS
    if plan.op == "resolve":
        return resolve.THREADS
    return cuda_params(plan).block if plan.op.startswith("forward") else backward_params(plan).block


def _use(plan: Plan) -> dict[str | None, tuple[int, float]]:
    """For each loop in the source: the bytes of a row, and the share of a block's threads that load.

    If buckets share a loop, that with the least share counts, among those with big rows if there are any.
    """
    geometry = geometry_of(plan)
    long = long_geometry(plan, geometry)
    use: dict[str | None, tuple[int, float]] = {g.name: (g.bucket.row_bytes, g.use) for g in geometry}
    for kind in long.kinds:
        big = [g for g in kind.members if g.bucket.row_bytes >= BIG_ROW] or kind.members
        worst = min(big, key=lambda g: g.use_of(long.chunks))
        use[kind.name] = worst.bucket.row_bytes, worst.use_of(long.chunks)
    return use


def _backward_use(plan: Plan) -> dict[str | None, tuple[int, float]]:
    """For each bucket's loops: the bytes of a gradient, and the share of a warp's lanes that load."""
    return {b.name: (b.item_bytes, b.use) for b in row_buckets(plan)}


def _results(opcode: str, operands: str) -> set[int]:
    """The registers that a load fills. A load of 32 bytes names two groups of four."""
    named = [int(n) for n in re.findall(r"\bR(\d+)\b", operands.split("[")[0])]
    each = max(1, _width(opcode) // 4 // len(named))
    return {first + k for first in named for k in range(each)}


def _touched(operands: str) -> set[int]:
    return {int(n) for n in re.findall(r"\bR(\d+)\b", operands)}


def _width(opcode: str) -> int:
    return next((bytes_ for mark, bytes_ in LOAD_BYTES.items() if mark in opcode.split(".")), 4)


def _usage(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for match in re.finditer(r"Function (\w+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)", text):
        yield match[1], (int(match[2]), int(match[3]))


def _run(tool: str, *arguments: str) -> str:
    """A CUDA binary utility's output. `ToolchainError` names the package to install if it is missing or fails."""
    path = cuda_module("cuda.pathfinder").find_nvidia_binary_utility(tool)
    remedy = f"install nvidia-cuda-{tool}, which comes with the extra: {INSTALL}"
    if path is None:
        raise ToolchainError(f"{tool} is not on this machine, but is needed to count registers; {remedy}")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{path} failed: {done.stderr.strip() or done.stdout.strip()}; {remedy}")
    return done.stdout
