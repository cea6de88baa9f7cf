"""Memory of kernels that run on the SIMT executor: arrays are far apart and full of garbage, and limits are a GPU's."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from embforge.codegen.build import build, source_of
from embforge.codegen.errors import KernelBugError
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.simt.toolchain import compile_image, twin_of
from embforge.inputs import Batch
from embforge.launch.metadata import metadata_of
from embforge.launch.simt.abi import Image, Region
from embforge.launch.simt.forward import SimtForward, _apart
from embforge.launch.simt.guarded import GARBAGE, GUARD, guarded_copy, guarded_empty, spanned_bytes
from embforge.verify.cases import Case, draw_batch

SPEC = CollectionSpec(
    [TableSpec("near", 100, 8), TableSpec("far", 1000, 8)], [FeatureSpec("x", "near"), FeatureSpec("y", "far")]
)
PLAN = Plan("forward", "simt", "sm_90", "int64", SPEC, CudaParams())


def neighbours(case: Case) -> tuple[Any, ...]:
    """A call with both tables in one tensor: rows from 228 on of the first would be rows of the second, 4 KiB later."""
    memory = torch.rand(2000, 8)
    tables = (memory[:100], memory[228:1228])
    values, offsets, weights = draw_batch(SPEC, case, 0)
    return metadata_of(tables, "error"), tables, Batch(values % 100, offsets, weights, case.batch, None), 0, "error"


@pytest.mark.parametrize(
    ("sound", "buggy", "says"),
    [
        (
            "column + static_cast<int64_t>(number) * stride",
            "column + static_cast<int64_t>(number + 228) * stride",
            r"out-of-bounds: reads .* past the end of `table near`",
        ),
        (
            "a.pooled + first * OUTPUT_WIDTH + f.column",
            "a.pooled + a.batch * OUTPUT_WIDTH + 1024 + first * OUTPUT_WIDTH + f.column",
            r"out-of-bounds: writes .* past the end of `pooled`",
        ),
    ],
)
def test_an_overrun_is_reported_as_out_of_bounds(sound: str, buggy: str, says: str, tmp_path: Path) -> None:
    text, image = source_of(PLAN), tmp_path / "image.so"
    assert sound in text, "the kernels changed: write this bug again for the new source"
    image.write_bytes(compile_image(text.replace(sound, buggy), f"{twin_of(PLAN).uri}.cu"))
    with pytest.raises(KernelBugError, match=says):
        SimtForward(PLAN, image)(*neighbours(Case(9, "one")))


def test_everything_but_large_tables_is_copied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, params=CudaParams(long_bag=256))
    kernel, call = SimtForward(plan, build(plan).binary), neighbours(Case(3, "split"))
    tables = call[1]
    seen: dict[str, Region] = {}
    launch = Image.launch

    def note(self: Image, *arguments: Any, **more: Any) -> Any:
        seen.update((region.name, region) for region in arguments[4])
        return launch(self, *arguments, **more)

    monkeypatch.setattr(Image, "launch", note)
    pooled = kernel(*call)[0]
    inputs = {"table near", "table far", "metadata", "values", "offsets", "weights"}
    assert seen.keys() == inputs | {"pooled", "scratch", "queue", "status"}
    assert seen["table near"].bytes == tables[0].nbytes and seen["pooled"].begin == pooled.data_ptr()
    inside = sorted(seen.values(), key=lambda r: r.begin)
    for before, behind in pairwise(inside):
        assert behind.begin - before.begin - before.bytes >= 2 * GUARD >= 128 * 1024
    monkeypatch.setattr("embforge.launch.simt.forward.MOST_COPIED", tables[0].nbytes)
    assert torch.equal(kernel(*call)[0], pooled)
    assert seen["table far"].begin == tables[1].data_ptr() and seen["table near"].begin != tables[0].data_ptr()


def test_tables_that_stay_and_overlap_are_one_region_by_both_names() -> None:
    regions = [Region("table b", 150, 100), Region("values", 400, 8), Region("table a", 100, 100)]
    assert _apart(regions) == [Region("table a/b", 100, 150), Region("values", 400, 8)]


def test_guarded_memory_has_the_layout_of_what_it_copies() -> None:
    made = guarded_empty((2, 3), torch.bfloat16, torch.device("cpu"))
    assert (made.shape, made.dtype, made.untyped_storage().nbytes()) == ((2, 3), torch.bfloat16, 12)
    assert made.view(torch.uint8).unique().tolist() == [GARBAGE]
    assert guarded_empty((0, 3), torch.float32, torch.device("cpu")).shape == (0, 3)
    numbers = torch.arange(24.0)
    rows = numbers[3:23].view(4, 5)[:, :3]
    copy = guarded_copy(rows)
    assert torch.equal(copy, rows) and copy.stride() == rows.stride() and copy.data_ptr() % 64 == rows.data_ptr() % 64
    assert spanned_bytes(rows) == spanned_bytes(copy) == copy.untyped_storage().nbytes() == 4 * 20
    assert spanned_bytes(numbers[8:].view(4, 4)[:, :3][:, :]) == 4 * 16
    assert spanned_bytes(numbers[9:].view(3, 5)[1:, 1:]) == 4 * 9  # there is no memory after the last row
    assert spanned_bytes(numbers[:8].view(8, 1).t()) == 4 * 8  # with one row, its stride does not matter
    numbers[:] = 0
    assert copy[0].tolist() == [3, 4, 5]


def test_shared_memory_is_that_of_the_arch() -> None:
    plan = replace(PLAN, arch="sm_75", params=CudaParams(long_bag=256))
    kernel, call = SimtForward(plan, build(plan).binary), neighbours(Case(60, "edges"))
    units = f"{twin_of(plan).uri}_long"
    most = 64 * 1024 - kernel._image.kernels[units].static_shared
    sound = kernel._shape
    kernel._shape = replace(sound, long_shared=most)
    kernel(*call)
    kernel._shape = replace(sound, long_shared=most + 1)
    with pytest.raises(
        KernelBugError, match=rf"kernel {units} .*65537 bytes of shared memory; allowed on sm_75: 65536"
    ):
        kernel(*call)
