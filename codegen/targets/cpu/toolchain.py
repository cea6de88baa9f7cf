"""C++ for the host: one shared library per plan, compiled by the machine's own compiler."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from embforge.codegen.errors import CompileError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.machine import find_compiler
from embforge.codegen.plan import Plan
from embforge.codegen.stages import StagePlan
from embforge.codegen.targets import Source, Toolchain
from embforge.codegen.targets.compiler_log import numbered_log
from embforge.codegen.targets.cpu.backward import backward_facts, reduce_facts, weight_gradient_facts
from embforge.codegen.targets.cpu.forward import forward_facts
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of
from embforge.codegen.targets.cpu.resolve import resolve_facts
from embforge.codegen.targets.cpu.stages import stage_facts


def _compile(plan: KernelPlan, source: Path) -> bytes:
    """The shared library of the rendered source."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="embforge-") as scratch:
        library = Path(scratch) / "kernel.so"
        command = [*compiler.command, *FLAGS, *isa_of(plan).flags, str(source), "-o", str(library)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise CompileError(
                f"{compiler.version} refused the generated source {source}\ncommand: {' '.join(command)}\n"
                + numbered_log(answer.stderr, source.read_text())
            )
        return library.read_bytes()


def _fingerprint(plan: KernelPlan) -> dict[str, str]:
    """What decides the binary in addition to the source: the compiler and its resolved flags, never `native`."""
    compiler = find_compiler()
    return {"compiler": compiler.version, "flags": " ".join([*compiler.command[1:], *FLAGS, *isa_of(plan).flags])}


CPU = Toolchain(
    sources={
        "forward": Source("cpu/forward/forward.cpp.j2", Plan, forward_facts),
        "forward_train": Source("cpu/forward/forward.cpp.j2", Plan, forward_facts),
        "backward": Source("cpu/backward/backward.cpp.j2", Plan, backward_facts),
        "reduce": Source("cpu/backward/backward.cpp.j2", Plan, reduce_facts),
        "weight_gradient": Source("cpu/backward/weight_gradient.cpp.j2", Plan, weight_gradient_facts),
        "resolve": Source("cpu/resolve/resolve.cpp.j2", Plan, resolve_facts),
        "stages": Source("cpu/stages/stages.cpp.j2", StagePlan, stage_facts),
    },
    compile=_compile,
    fingerprint=_fingerprint,
    resources=lambda plan, binary: [],
)
