"""On the example specs most lanes have work and most loaded bytes are used: the limits of benchmarks/lanes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lanes import count_other, count_ours, draw, misses
from benchmarks.warp_per_bag import KERNEL, warp_per_bag_text
from embforge.codegen.targets.cuda.nvrtc import compile_cubin


@pytest.mark.parametrize(("spec", "size"), [("dlrm", 256), pytest.param("mixed", 64, marks=pytest.mark.soak)])
def test_lanes_have_work_and_sectors_are_used(spec: str, size: int) -> None:
    """The limits are harder to keep with small batches, as here; `make lanes` has larger ones."""
    batch = draw(spec, f"uniform,len=geo:20,batch={size}")
    figures = count_ours(batch)
    assert figures.rows.instructions > 0 and figures.whole.sectors > 0
    assert not misses(batch, figures)


def test_the_other_mapping_reads_the_same_rows_with_fewer_lanes() -> None:
    batch = draw("dlrm", "uniform,len=geo:20,batch=64")
    ours, other = count_ours(batch), count_other(batch)
    assert ours.whole.bytes == other.whole.bytes
    assert other.active < ours.active / 2


def test_the_other_mapping_compiles_as_cuda(tmp_path: Path) -> None:
    source = tmp_path / f"{KERNEL}.cu"
    source.write_text(warp_per_bag_text())
    assert compile_cubin(source, "sm_90")
