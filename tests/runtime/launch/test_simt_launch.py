"""The SIMT launcher: its structures, its errors, and counters that can be checked by hand."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import embforge
from embforge.cli.gen import emit
from embforge.codegen.build import build
from embforge.codegen.errors import KernelBugError, MissingKernelError
from embforge.codegen.machine import find_compiler
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import Shape
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.simt.toolchain import _simt_directory, compile_image
from embforge.collection import EmbeddingCollection
from embforge.inputs import Batch
from embforge.launch.metadata import metadata_of
from embforge.launch.reference import forward as reference
from embforge.launch.simt import abi
from embforge.launch.simt import report as simt_report
from embforge.launch.simt.abi import ABI, BUG, COUNT, DONE, Region, load_image
from embforge.launch.simt.counters import KernelCounters, Traffic, kind_of, together
from embforge.launch.simt.forward import SimtForward, SimtOptions
from embforge.launch.simt.report import bug_of
from embforge.verify.cases import Case, draw_batch, draw_tables
from embforge.verify.counting import count_lookup

SPEC = CollectionSpec(
    [TableSpec("a", 100, 8), TableSpec("b", 50, 5, "fp16")],
    [FeatureSpec("x", "a"), FeatureSpec("y", "b", "mean", weighted=True), FeatureSpec("s", "b", "none")],
    name="simt_launch",
)
PLAN = Plan("forward", "simt", "sm_90", "int64", SPEC, CudaParams())


# ---- the interface --------------------------------------------------------------------------------------------------


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    lines = ['#include "abi.h"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    want = {"SIMT_ABI": ABI, "SIMT_COUNT": COUNT}
    of_module = [each for each in vars(abi).values() if isinstance(each, type)]
    structures = [each for each in of_module if issubclass(each, ctypes.Structure)]
    assert len(structures) == 7
    for name in want:
        lines.append(f'    std::printf("{name} %zu\\n", static_cast<size_t>({name}));')
    for structure in structures:
        name = structure.__name__
        want[name] = ctypes.sizeof(structure)
        lines.append(f'    std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:  # type: ignore[misc]
            want[f"{name}.{field}"] = getattr(structure, field).offset
            lines.append(f'    std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text("\n".join([*lines, "}"]))
    command = [*find_compiler().command, "-std=c++17", f"-I{_simt_directory()}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    answer = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert {name: int(number) for name, number in map(str.split, answer.splitlines())} == want


# ---- kernels written by hand ----------------------------------------------------------------------------------------

KERNELS = """\
extern "C" __global__ void __launch_bounds__(64) double_all(const float* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2 * in[i];
}

__device__ __forceinline__ void put(float* out, int i) {
    out[i] = 1.0f;
}

extern "C" __global__ void too_far(float* out) {
    if (threadIdx.x == 7) put(out, 64);
}

extern "C" __global__ void all_at_once(float* out) {
    out[0] = threadIdx.x;
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "kernels.so"
    path.write_bytes(compile_image(KERNELS, "by_hand.cu"))
    return path


def region(name: str, tensor: Tensor, **more: Any) -> Region:
    return Region(name, tensor.data_ptr(), tensor.nbytes, **more)


def pointer(tensor: Tensor) -> ctypes.c_uint64:
    return ctypes.c_uint64(tensor.data_ptr())


@pytest.mark.parametrize("seed", range(3))
def test_a_launch_computes_and_counts(kernels: Path, seed: int) -> None:
    given, made = torch.arange(150.0), torch.zeros(160)
    status, _, counted = load_image(kernels).launch(
        "double_all",
        (3, 1, 1),
        (64, 1, 1),
        [pointer(given), pointer(made), ctypes.c_int(150)],
        [region("given", given), region("made", made, writable=True)],
        seed=seed,
        count=True,
    )
    assert status == DONE and counted is not None
    assert torch.equal(made[:150], 2 * given) and not made[150:].any()
    # 150 threads of 6 warps, the last with 22 at work; 4 bytes each, 8 to a sector of an aligned array.
    for traffic in (counted.loads[0], counted.stores[1]):
        assert (traffic.instructions, traffic.lanes, traffic.bytes, traffic.sectors) == (5, 150, 600, 19)
    assert counted.loads[1].instructions == counted.stores[0].instructions == 0


def bug(kernels: Path, kernel: str, seed: int = 0) -> KernelBugError:
    made = torch.zeros(64)
    regions = [region("made", made, writable=True)]
    status, report, counted = load_image(kernels).launch(
        kernel, (1, 1, 1), (32, 1, 1), [pointer(made)], regions, seed=seed
    )
    assert status == BUG and counted is None
    return bug_of(report, kernels, KERNELS, seed)


def test_a_bug_names_kernel_thread_line_and_callers(kernels: Path) -> None:
    lines = str(bug(kernels, "too_far", seed=5)).splitlines()
    assert lines[0].startswith("kernel too_far: out-of-bounds: ")
    assert lines[1:] == [
        "  block 0, thread 7, by_hand.cu:7 in put",
        "    7 | out[i] = 1.0f;",
        "    called in too_far, line 11",
        "  schedule seed 5; the same seed gives the same schedule",
    ]


def test_a_race_names_both_threads(kernels: Path) -> None:
    text = str(bug(kernels, "all_at_once"))
    assert text.startswith("kernel all_at_once: race: ")
    found = re.findall(r"^  (earlier: )?block 0, thread (\d+), by_hand.cu:15 in all_at_once$", text, re.MULTILINE)
    (_, one), (label, other) = found
    assert label == "earlier: " and one != other


def test_without_addr2line_the_place_in_the_image_is_named(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt_report.shutil, "which", lambda name: None)
    assert re.search(r"block 0, thread 7, at .*kernels\.so \+ 0x[0-9a-f]+ .*addr2line", str(bug(kernels, "too_far")))


def test_an_impossible_launch_is_refused(kernels: Path) -> None:
    image = load_image(kernels)
    for kernel, block in (("nowhere", 32), ("double_all", 65)):
        status, report, _ = image.launch(kernel, (1, 1, 1), (block, 1, 1), [], [])
        assert status not in (DONE, BUG) and report.message


# ---- plans ----------------------------------------------------------------------------------------------------------


def forward() -> SimtForward:
    return SimtForward(PLAN, build(PLAN).binary)


def given(samples: int = 6) -> tuple[Any, ...]:
    case = Case(samples)
    drawn, tables = draw_batch(SPEC, case, 3), draw_tables(SPEC, 3)
    rows = int(drawn.offsets[-1] - drawn.offsets[2 * case.batch])
    return metadata_of(tables, "error"), tables, Batch(*drawn, case.batch, None), 5 * rows, "error"


def test_every_call_has_a_schedule_of_its_own_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call = forward(), given()
    want = reference.lookup(SPEC, *call[2][:3], call[1], bounds_check="error")
    seeds = []
    run = SimtForward.run

    def note(self: SimtForward, *arguments: Any) -> Any:
        seeds.append(arguments[-1].seed)
        return run(self, *arguments)

    monkeypatch.setattr(SimtForward, "run", note)
    for _ in range(3):
        assert all(map(torch.equal, kernel(*call), want))
    assert seeds == [0, 1, 2]


def test_results_that_no_thread_wrote_are_named() -> None:
    kernel = forward()
    (symbol, ranges), *others = kernel._shape.kernels
    kernel._shape = replace(kernel._shape, kernels=())
    with pytest.raises(KernelBugError, match=r"unwritten: .*feature 'x', sample 0, column 0 of the pooled output"):
        kernel.run(*given(), SimtOptions(seed=9))
    none, *_ = (i for i, r in enumerate(ranges) if r.shape is Shape.SEQUENCE)
    kernel._shape = replace(kernel._shape, kernels=((symbol, ranges[:none] + ranges[none + 1 :]), *others))
    with pytest.raises(KernelBugError, match=r"(?s)unwritten: no kernel wrote feature.*schedule seed 9"):
        kernel.run(*given(30), SimtOptions(seed=9))


def test_a_missing_sequence_row_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call = forward(), given()
    offsets = call[2].offsets
    lengths = offsets.diff()[12:]
    sample = int(lengths.nonzero()[-1])  # the last bag with an id: its last row is the last of the sequence

    def last_is_missing(self: Any, name: str) -> int | None:
        return call[3] * 4 - 4 if name == "sequence" else None

    monkeypatch.setattr("embforge.launch.simt.forward._Memory.unwritten", last_is_missing)
    place = f"feature 's', sample {sample}, position {int(lengths[sample]) - 1}, column 4 of the sequence output"
    with pytest.raises(KernelBugError, match=place):
        kernel(*call)


def test_bad_status_for_a_good_batch_is_the_kernel_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tables, batch, elements, mode = given()
    few = metadata_of([t[:1] for t in tables], "error")  # the kernel gets a smaller number of rows than tables have
    with pytest.raises(KernelBugError, match="reported BAD_ID for a batch without mistakes"):
        forward()(few, tables, batch, elements, mode)


def test_trusted_ids_that_are_bad_are_the_callers_fault() -> None:
    module = EmbeddingCollection(SPEC, backend="simt", bounds_check="unchecked")
    values, offsets = torch.tensor([5, 10**6, 2]), torch.tensor([0, 1, 2, 3])
    with pytest.raises(IndexError, match=r"feature 'y': id 1000000 of sample 0, position 0"):
        module.forward_dict(values, offsets)


def test_arguments_may_share_memory() -> None:
    """Values share memory with offsets, and one table with another."""
    spec = CollectionSpec(
        [TableSpec("a", 100, 4), TableSpec("b", 40, 4)], [FeatureSpec("x", "a"), FeatureSpec("y", "b")]
    )
    module, truth = (EmbeddingCollection(spec, backend=name) for name in ("simt", "reference"))
    rows = {"tables.a.weight": module.weight("a").detach(), "tables.b.weight": module.weight("a").detach()[20:60]}
    numbers = torch.tensor([0, 2, 3, 3, 4])
    got, want = (torch.func.functional_call(m, rows, (numbers[1:], numbers)) for m in (module, truth))
    assert torch.equal(got, want)


def test_kernels_made_ahead_of_time(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = emit([PLAN], tmp_path)
    assert record["symbol"] == PLAN.symbol and record["target"] == "simt" and "int64_t* queue" in record["arguments"]
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    module = EmbeddingCollection(SPEC, backend="simt", kernels=tmp_path)
    drawn = draw_batch(SPEC, Case(3), 0)
    with torch.no_grad():
        assert len(module.forward_dict(*drawn)) == 3
        assert f"kernel: {PLAN.uri}" in embforge.explain(module)
        with pytest.raises(MissingKernelError, match=r"embforge gen SPEC --target simt --arch sm_90 --ids int32"):
            module.forward_dict(drawn.values.int(), drawn.offsets.int(), drawn.weights)
    with pytest.raises(MissingKernelError, match=r"--ids int64 --train none"):
        module.forward_dict(*drawn)


# ---- counters -------------------------------------------------------------------------------------------------------


def test_counters_of_a_lookup_that_can_be_counted_by_hand() -> None:
    spec = CollectionSpec(
        [TableSpec("t", 64, 8), TableSpec("odd", 64, 3)], [FeatureSpec("f", "t"), FeatureSpec("g", "odd")]
    )
    plan = replace(PLAN, spec=spec)
    batch, ids = 64, 4
    values = torch.arange(2 * batch * ids) % 64
    drawn = Batch(values, torch.arange(0, 2 * batch * ids + 1, ids), None, batch, None)
    kernel, everything = count_lookup(plan, draw_tables(spec, 0), drawn)
    assert (kernel.name, everything.name, kernel.outputs, everything.outputs) == ("forward", "all", 128, 128)
    assert kernel.whole_sectors == ("t",)
    rows = kernel.counters.rows_of(["t"])
    # Rows of 32 bytes, each a sector that two lanes load 16 bytes of.
    assert (rows.bytes, rows.useful, rows.sectors, rows.lanes, rows.efficiency) == (8192, 8192, 256, 512, 1.0)
    assert kernel.counters.rows_of(["odd"]).bytes == 3 * 4 * batch * ids
    assert kernel.counters.stored("outputs").bytes == 4 * 11 * batch
    assert kernel.counters.loaded("ids").bytes >= 8 * values.numel()
    assert kernel.per_output("offsets") is not None and kernel.per_output("ids") is not None
    assert kernel.counters.loaded("work").bytes == kernel.counters.atomics == 0 < kernel.counters.barriers
    assert everything.counters.loads == kernel.counters.loads
    data = kernel.to_json()
    assert data["tables"]["t"]["efficiency"] == data["whole_sector_rows_efficiency"] == 1.0
    assert data["loads"]["rows"]["lanes"] == sum(data["tables"][name]["lanes"] for name in ("t", "odd"))


def test_counters_add_up() -> None:
    some, more = Traffic(1, 2, 32, 128, 128, 4), Traffic(1, 0, 16, 64, 32, 4)
    assert some + more == Traffic(2, 2, 48, 192, 160, 8)
    assert (some + more).active_lanes == 24 and (some + more).efficiency == 160 / 256
    assert Traffic().efficiency is None and Traffic().active_lanes is None
    one = KernelCounters("k", {"table a": some, "values": more}, {"pooled": some}, barriers=2, atomics=1)
    two = KernelCounters("l", {"table a": more, "table b": some}, {"status": more}, barriers=3)
    both = together([one, two])
    assert both.loaded("rows") == some + more + some and both.rows_of(["b"]) == some
    assert both.stored("outputs") == some and both.stored("work") == more
    assert (both.barriers, both.atomics) == (5, 1)
    assert [kind_of(name) for name in ("values", "weights", "table values")] == ["ids", "weights", "rows"]
