"""What a compiler can settle about the CUDA kernels of the stages between ranks: they compile everywhere, no spills."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.stage_cases import NARROW, SELECTIONS, USUAL
from simt.test_instrumentation import unwatched

from embforge.codegen.build import build, source_of
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.manifest import kernel_record, write_manifest
from embforge.codegen.stages import STAGES, StagePlan
from embforge.codegen.targets.cuda.stages import KERNELS, THREADS, symbol_of

MOST_REGISTERS = 80
"""The registers that a thread may take, so that six blocks of 128 threads fit on a multiprocessor."""


@pytest.mark.parametrize(
    ("arch", "formats"), [("sm_75", NARROW), ("sm_90", USUAL), ("sm_100", NARROW)], ids=lambda value: str(value)[:6]
)
def test_kernels_of_the_stages_compile_without_spills(arch: str, formats: tuple[str, ...]) -> None:
    plan = StagePlan("cuda", arch, *formats, SELECTIONS)
    figures = {figure["symbol"]: figure for figure in build(plan, resources=True).resources}
    assert set(figures) == {symbol_of(plan, stage, kernel) for stage in STAGES for kernel in KERNELS[stage]}
    for symbol, figure in figures.items():
        assert figure["spill_bytes"] == figure["local_instructions"] == 0, symbol
        assert figure["registers"] <= MOST_REGISTERS, (symbol, figure["registers"])


def test_a_simt_image_runs_the_text_of_the_cuda_plan() -> None:
    cuda, simt = (StagePlan(target, "sm_90", *USUAL) for target in ("cuda", "simt"))
    assert symbol_of(simt, "pack", "rows") == symbol_of(cuda, "pack", "rows") == f"{cuda.uri}_pack_rows"
    assert THREADS % 32 == 0


@pytest.mark.soak
@pytest.mark.parametrize("formats", [USUAL, NARROW], ids=["usual", "narrow"])
def test_the_executor_sees_every_access(formats: tuple[str, ...], tmp_path: Path) -> None:
    assert not unwatched(source_of(StagePlan("cuda", "sm_90", *formats, SELECTIONS)), tmp_path)


@pytest.mark.parametrize("target", ["cpu", "cuda", "simt"])
def test_without_jit_a_missing_stage_library_is_an_error(
    target: str, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    plan = StagePlan(target, "avx2" if target == "cpu" else "sm_90", *USUAL)
    with pytest.raises(MissingKernelError, match=f"kernel {plan.uri} is not in the cache.*let one process compile it"):
        build(plan)
    write_manifest(tmp_path, [kernel_record(plan, "text", "text", "stages.cu", None, None, [])])
    with pytest.raises(MissingKernelError, match=r"is not in .* and the cache"):
        build(plan, kernels=tmp_path)
