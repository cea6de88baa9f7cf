"""CUDA's language on the executor: indices, warp operations, votes, atomics, numbers, vectors."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from running import HERE, Buffer, aligned, image_of, launch

SEEDS = range(4)


def run(
    kernel: str,
    *arrays: NDArray[Any],
    grid: tuple[int, ...] = (1,),
    block: tuple[int, ...] = (32,),
    shared: int = 0,
    seed: int = 0,
    count: bool = False,
) -> None:
    buffers = {f"argument {i}": Buffer(array) for i, array in enumerate(arrays)}
    image = image_of((HERE / "language.cu").read_text(), "language.cu")
    found = launch(image, kernel, buffers, grid=grid, block=block, shared=shared, seed=seed, count=count)
    assert found.report is None, found.report.message


def test_indices_have_three_dimensions() -> None:
    grid, block = (2, 3, 2), (5, 2, 3)
    out = aligned(6 * 12 * 30, numpy.int32)
    run("indices", out, grid=grid, block=block)
    rows = {tuple(row) for row in out.reshape(-1, 6).tolist()}
    assert len(rows) == 12 * 30
    assert max(rows) == (1, 2, 1, 4, 1, 2)


@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_warp_operations_exchange_between_lanes(seed: int, count: bool) -> None:
    out = aligned(32 * 16, numpy.int32)
    run("warps", out, seed=seed, count=count)
    lane = numpy.arange(32)
    got = out.reshape(32, 16)
    expected = {
        0: (lane + 3) % 32 * 10,
        1: (lane // 8 * 8 + 1) * 10,
        2: numpy.where(lane >= 2, lane - 2, lane),
        3: numpy.where(lane % 4 >= 1, lane - 1, lane),
        4: numpy.where(lane + 5 < 32, lane + 5, lane),
        5: lane ^ 7,
        6: numpy.full(32, _signed(sum(1 << i for i in range(0, 32, 3)))),
        7: numpy.full(32, 1),
        8: numpy.full(32, 2),
        9: numpy.array([_signed(sum(1 << j for j in range(32) if j % 5 == i % 5)) for i in range(32)]),
        10: numpy.full(32, lane.sum()),
        11: numpy.full(32, -5),
        12: numpy.full(32, 26),
        13: numpy.full(32, -1),
        14: numpy.full(32, numpy.bitwise_xor.reduce(lane * 3)),
    }
    for column, want in expected.items():
        assert (got[:, column] == want).all(), column
    assert (got[:16, 15] == 0x0000FFFF).all()
    assert (got[16:, 15] == _signed(0xAAAA0000)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_of_eight_bytes_in_parts_of_a_warp(seed: int) -> None:
    out, numbers = aligned(32, numpy.float64), aligned(32, numpy.int64)
    run("wide_shuffles", out, numbers, seed=seed)
    lane = numpy.arange(32)
    assert (out == (lane ^ 1) + 0.5).all()
    assert (numbers == (1 << 40) + numpy.where(lane < 8, 0, 9)).all()


@pytest.mark.parametrize("threads", [32, 71, 96, 1024])
def test_votes_of_a_block_count_all_its_threads(threads: int) -> None:
    out = aligned(4 * threads, numpy.int32)
    run("votes", out, block=(threads,))
    some = int(threads > 70) + 2 * int(threads > 700)
    expected = [some, 1, -(-threads // 3), 32]
    assert (out.reshape(-1, 4) == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_lose_nothing(seed: int) -> None:
    ints, words, longs = aligned(4, numpy.int32), aligned(6, numpy.uint32), aligned(4, numpy.uint64)
    floats, doubles = aligned(1), aligned(1, numpy.float64)
    words[0] = 0xFFFFFFFF
    run("atomics", ints, words, longs, floats, doubles, grid=(3,), block=(64,), seed=seed)
    total = 3 * 64
    assert ints.tolist() == [total * (total - 1) // 2, -total, 1 - total, total - 1]
    parity = sum(1 << bit for bit in range(7) if sum(i % 7 == bit for i in range(total)) % 2)
    assert words[:4].tolist() == [0, 0xFFFFFFFF, parity, total % 10]
    assert words[5] == total
    down = 0
    for _ in range(total):
        down = 9 if down == 0 else down - 1
    assert words[4] == down
    assert longs.tolist() == [total << 40, (total - 1) << 33, 1, 77]
    assert floats[0] == total / 2 and doubles[0] == total / 4


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_spin_let_others_run(seed: int) -> None:
    out = aligned(2, numpy.int32)
    run("spin_lock", out, grid=(2,), block=(48,), seed=seed)
    assert out.tolist() == [48, 48]


def test_bit_functions_equal_those_of_python() -> None:
    values = aligned(64, numpy.uint32)
    values[:] = numpy.random.default_rng(0).integers(0, 2**32, 64, dtype=numpy.uint32)
    values[:3] = (0, 1, 0x80000000)
    out = aligned(640, numpy.int32)
    run("bits", values, out, block=(64,))
    for x, got in zip(values.tolist(), out.view(numpy.uint32).reshape(64, 10).tolist(), strict=True):
        lowest = (x & -x).bit_length()
        assert got == [
            x.bit_count(),
            lowest,
            32 - x.bit_length(),
            int(f"{x:032b}"[::-1], 2),
            x.bit_count() + 1,
            lowest + 8 if lowest else 0,
            64 - x.bit_length(),
            x * 0x9E3779B9 >> 32,
            x >> 2,
            ((~x & 0xFFFFFFFF) << 32 | x) << 5 >> 32 & 0xFFFFFFFF,
        ]


def test_numbers_convert_as_torch_has_them() -> None:
    values = aligned(4096)
    generator = numpy.random.default_rng(1)
    values[:] = generator.standard_normal(4096) * 10.0 ** generator.integers(-8, 3, 4096)
    values[:4] = (0.0, -0.0, 1e-8, 400.0)
    halves, bf16s, fp8s = aligned(4096), aligned(4096), aligned(4096)
    run("conversions", values, halves, bf16s, fp8s, grid=(16,), block=(256,))
    given = torch.from_numpy(values.copy())
    assert torch.equal(torch.from_numpy(halves.copy()), given.half().float())
    assert torch.equal(torch.from_numpy(bf16s.copy()), given.bfloat16().float())
    saturated = given.clamp(-448.0, 448.0)
    assert torch.equal(torch.from_numpy(fp8s.copy()), saturated.to(torch.float8_e4m3fn).float())


def test_vectors_are_loaded_and_stored_whole() -> None:
    values, out, doubles = aligned(128), aligned(128), aligned(64, numpy.float64)
    words, packed = aligned(64, numpy.uint32), aligned(128, numpy.uint32)
    values[:], words[:] = numpy.arange(128), numpy.arange(64) * 7
    run("vectors", values, out, doubles, words, packed)
    rows = values.reshape(32, 4)
    assert (out.reshape(32, 4) == rows + numpy.array([1, 0, 0, 0])).all()
    assert (doubles.reshape(32, 2) == rows[:, 1:3]).all()
    x, y = words.reshape(32, 2).T
    assert (packed.reshape(32, 4) == numpy.stack([x, y, x ^ y, x], 1)).all()


def test_dynamic_shared_memory_has_the_size_of_the_launch() -> None:
    values, out = aligned(100, numpy.int32), aligned(100, numpy.int32)
    values[:] = numpy.arange(100)
    run("reversed_by_dynamic_shared", values, out, block=(100,), shared=400)
    assert (out == values[::-1]).all()


@pytest.mark.parametrize("count", [False, True])
def test_sums_of_one_row_per_warp_are_right(count: bool) -> None:
    lengths = numpy.array([0, 1, 31, 32, 33, 100, 7, 64])
    offsets = aligned(9, numpy.int32)
    offsets[1:] = lengths.cumsum()
    values, out = aligned(int(lengths.sum())), aligned(8)
    values[:] = 2.0
    run("ragged", values, offsets, out, grid=(4,), block=(64,), count=count)
    assert (out == lengths * numpy.tile([3.0, 5.0], 4)).all()


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
