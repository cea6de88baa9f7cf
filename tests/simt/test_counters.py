"""The executor's counters agree with counts by hand, on small kernels."""

from __future__ import annotations

import pytest
from running import HERE, Buffer, Run, aligned, image_of, launch

from embforge.launch.simt.abi import Counted, SimtTraffic

ALL = 32


def count(kernel: str, grid: int = 1, block: int = 32, seed: int = 0) -> Counted:
    buffers = {"in": Buffer(aligned(512), writable=False), "out": Buffer(aligned(512))}
    found: Run = launch(
        image_of((HERE / "counting.cu").read_text(), "counting.cu"),
        kernel,
        buffers,
        grid=(grid,),
        block=(block,),
        seed=seed,
        count=True,
    )
    assert found.report is None, found.report.message
    assert found.counted is not None
    return found.counted


def facts(traffic: SimtTraffic) -> tuple[int, int, int, int, int]:
    return traffic.instructions, traffic.lanes, traffic.bytes, traffic.useful, traffic.sectors


@pytest.mark.parametrize(
    ("kernel", "loads"),
    [
        ("neighbours", (1, ALL, 128, 128, 4)),
        ("strided", (1, ALL, 128, 128, 32)),
        ("shifted", (1, ALL, 128, 128, 5)),
        ("same_for_all", (1, ALL, 128, 4, 1)),
        ("sixteen_bytes", (1, ALL, 512, 512, 16)),
        ("half_a_warp", (1, 16, 64, 64, 2)),
        ("triangle", (32, 32 * 33 // 2, 4 * 32 * 33 // 2, 4 * 32, 32)),
        ("every_other_turn", (4, 4 * 16, 4 * 64, 4 * 64, 4 * 4)),
        ("nested", (6, 2 * (32 + 16 + 16), 4 * 128, 4 * 128, 2 * (4 + 4 + 4))),
        ("both_ways", (2, 32, 128, 128, 8)),
    ],
)
def test_loads_are_counted_by_bytes_sectors_and_lanes(kernel: str, loads: tuple[int, int, int, int, int]) -> None:
    for seed in range(3):
        counted = count(kernel, seed=seed)
        assert facts(counted.loads[0]) == loads
        assert counted.loads[0].idle == 0
        lanes = 16 if kernel == "half_a_warp" else ALL
        wide = 4 if kernel == "sixteen_bytes" else 1
        assert facts(counted.stores[1]) == (1, lanes, 4 * wide * lanes, 4 * wide * lanes, wide * lanes // 8)


@pytest.mark.parametrize(
    ("kernel", "wavefronts", "conflicts"),
    [("no_conflict", 1, 0), ("all_in_one_bank", 32, 31), ("two_in_a_bank", 2, 1)],
)
def test_bank_conflicts_are_counted(kernel: str, wavefronts: int, conflicts: int) -> None:
    counters = count(kernel).counters
    assert counters.shared_stores.sectors == counters.shared_loads.sectors == wavefronts
    assert counters.bank_conflicts == 2 * conflicts


def test_a_broadcast_of_eight_bytes_per_lane_is_no_conflict() -> None:
    """Lanes of 8 bytes go in two halves, each a broadcast of its own."""
    counters = count("broadcast").counters
    assert (counters.shared_stores.sectors, counters.bank_conflicts) == (2, 0)
    assert (counters.shared_loads.instructions, counters.shared_loads.lanes, counters.shared_loads.useful) == (
        1,
        32,
        2 * 8,
    )


def test_barriers_and_atomics_are_counted() -> None:
    counters = count("barriers_and_atomics", grid=3, block=96).counters
    assert counters.barriers == 3 * 2
    assert counters.warp_syncs == 3 * 3
    assert (counters.atomics, counters.atomic_lanes) == (3 * 2, 3 * 40)
