"""Bugs that are put into the kernels of a backward: each is reported with its place, and no row is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.training import batch_of, gradients_of, metadata_of, module_of, plan_of

from embforge.codegen.build import source_of
from embforge.codegen.errors import KernelBugError
from embforge.codegen.rules import builtin
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.simt.toolchain import compile_image
from embforge.launch.simt.backward import SimtBackward

SPEC = CollectionSpec((TableSpec("t", 20, 32),), (FeatureSpec("f", "t"),), name="seeded_backward")
PLAN = plan_of(SPEC, builtin.rowwise_adagrad())
BAGS = [[[19] * 200, [1], [2, 2], [3] * 40, [4] * 65]]
BUGS = (
    (
        "terms of a row's sum that no thread waits for",
        "        __syncwarp(place.mask());\n#pragma unroll\n        for (int o = 0; o < OWN; ++o) {",
        "\n#pragma unroll\n        for (int o = 0; o < OWN; ++o) {",
        r"race: .*shared variable",
    ),
    ("off-by-one row", "+ number * B::STRIDE", "+ (number + 1) * B::STRIDE", r"out-of-bounds: reads .* `table t`|race"),
    (
        "runs that wait are worked on in their turn, too",
        "    if (!waited && run.length > WAITS) return;\n",
        "\n",
        r"race: .*`(table|states of) t`",
    ),
    (
        "partial sums of the wrong chunk",
        "level + (first >> shift) * PARTIAL_WIDTH",
        "level + ((first >> shift) + 1) * PARTIAL_WIDTH",
        r"(uninitialised|out-of-bounds): reads .*`partials`",
    ),
)


@pytest.mark.parametrize(("name", "sound", "buggy", "says"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_bug_is_found_and_changes_no_row(name: str, sound: str, buggy: str, says: str, tmp_path: Path) -> None:
    text = source_of(PLAN)
    assert sound in text, name
    image = tmp_path / "image.so"
    image.write_bytes(compile_image(text.replace(sound, buggy), f"{replace(PLAN, target='cuda').uri}.cu", PLAN.arch))
    module, batch = module_of(PLAN), batch_of(BAGS, torch.int64)
    before = [tensor.clone() for tensor in module.everything()]
    kernel, metadata, gradients = SimtBackward(PLAN, image), metadata_of(module, "error"), gradients_of(module, batch)
    with pytest.raises(KernelBugError, match=says):
        kernel(metadata, module.tables, module.states, batch, gradients, module.hyper, module.counters, "error")
    assert all(map(torch.equal, module.everything(), before))
