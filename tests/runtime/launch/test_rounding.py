"""Rounding to narrow formats: the generator's known answers, nearest as torch's, stochastic without bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES, TABLE_DTYPES, narrow_floats
from embforge.launch.reference.rounding import philox, random16, rounded
from embforge.number_formats import torch_dtype

NARROW = [form.name for form in narrow_floats(TABLE_DTYPES)]
LARGEST = {name: torch.finfo(torch_dtype(name)).max for name in NARROW}


def bits(x: Tensor) -> list[int]:
    mask = (1 << 8 * x.element_size()) - 1
    return [value & mask for value in x.view(torch.uint8 if x.element_size() == 1 else torch.int16).tolist()]


def words(*numbers: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([number]) for number in numbers)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    found = philox(words(*counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def test_an_element_takes_its_half_word() -> None:
    seed, t, table, row = -(2**40) - 3, 2**33 + 5, 7, 2**34 + 11
    found = random16(seed, t, table, torch.tensor([0, row]), 21)[1].tolist()
    for column in (0, 1, 6, 7, 8, 15, 20):
        counter = words(column // 8, row & 0xFFFFFFFF, row >> 32 | table << 8, t & 0xFFFFFFFF)
        word = int(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[column % 8 // 2])  # type: ignore[arg-type]
        assert found[column] == (word >> 16 if column % 2 else word & 0xFFFF)


def test_random_numbers_differ_by_all_that_they_are_made_of() -> None:
    rows = torch.arange(3)
    base = random16(1, 1, 0, rows, 40)
    assert base.shape == (3, 40)
    assert int(base.min()) >= 0
    assert int(base.max()) < 65536
    assert base.unique().numel() > 110
    for other in (random16(2, 1, 0, rows, 40), random16(1, 2, 0, rows, 40), random16(1, 1, 1, rows, 40)):
        assert int((other == base).sum()) < 3
    assert torch.equal(random16(1, 1, 0, rows, 9), base[:, :9])


def interesting(name: str) -> Tensor:
    """Numbers of all sizes within the format's range: normal, subnormal, halfway between two, and close to halfway."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(-30, 16, (20_000,), generator=random)
    x = torch.ldexp(torch.randn(20_000, generator=random), sizes)
    exact = x.to(torch_dtype(name)).float()
    step = torch.nextafter(exact, torch.tensor(torch.inf)) - exact
    halfway = exact + torch.ldexp(torch.ones(()), exact.abs().clamp(min=2**-30).log2().floor() - 4)
    x = torch.cat([x, exact, exact + step, halfway, -halfway, torch.tensor([0.0, -0.0, 2.0**-10, 3 * 2.0**-10, 1e-45])])
    return x[x.abs() <= LARGEST[name]]


@pytest.mark.parametrize("name", NARROW)
def test_nearest_is_torchs(name: str) -> None:
    x = interesting(name)
    assert bits(rounded(x, name, "nearest")) == bits(x.to(torch_dtype(name)))


@pytest.mark.parametrize("name", NARROW)
def test_stochastic_keeps_what_fits_and_otherwise_takes_a_neighbour(name: str) -> None:
    x = interesting(name)
    x = x[x.abs() < LARGEST[name]]
    nearest = x.to(torch_dtype(name))
    distance = nearest.float().abs() - x.abs()
    unsigned = (1 << DTYPES[name].bits - 1) - 1
    size = torch.tensor(bits(nearest)) & unsigned
    below, above = size - (distance > 0).long(), size + (distance < 0).long()
    for random in (
        torch.zeros_like(size),
        torch.full_like(size, 65535),
        random16(3, 1, 0, torch.arange(len(x)), 1)[:, 0],
    ):
        result = rounded(x, name, "stochastic", random)
        assert torch.equal(result.float().signbit(), x.signbit())
        found = torch.tensor(bits(result)) & unsigned
        assert bool(((found == below) | (found == above)).all())
    assert int((below == above).sum()) > 10_000
    assert int((below != above).sum()) > 10_000


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("name", "sign", "largest", "infinity", "nan"),
    [
        ("bf16", 0x8000, 0x7F7F, 0x7F80, 0x7FC0),
        ("fp16", 0x8000, 0x7BFF, 0x7C00, 0x7E00),
        ("fp8_e4m3", 0x80, 0x7E, 0x7E, 0x7F),
        ("fp8_e5m2", 0x80, 0x7B, 0x7C, 0x7F),
    ],
)
def test_edges_of_formats_round_right(
    name: str, rounding: str, sign: int, largest: int, infinity: int, nan: int
) -> None:
    over = 3.4e38 if name == "bf16" else LARGEST[name] * 1.3
    inf = torch.inf
    x = torch.tensor([0.0, -0.0, inf, -inf, torch.nan, -torch.nan, over, -over, 1e-45, -1e-45, LARGEST[name]])
    tiny = int(name == "bf16" and rounding == "stochastic")  # a subnormal of bf16, too, that may be rounded up
    expected = [0, sign, infinity, sign | infinity, nan, nan, largest, sign | largest, tiny, sign | tiny, largest]
    always = torch.full(x.shape, 65535)
    assert bits(rounded(x, name, rounding, always)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bf16", 1.001),
        ("bf16", -3e-39),
        ("fp16", 0.1),
        ("fp16", -1000.3),
        ("fp16", 3.3e-6),
        ("fp16", 2.1e-8),
        ("fp8_e4m3", 0.3),
        ("fp8_e4m3", -17.2),
        ("fp8_e4m3", 0.0031),
        ("fp8_e4m3", -0.0007),
        ("fp8_e5m2", 0.3),
        ("fp8_e5m2", -1000.3),
        ("fp8_e5m2", 1.2e-5),
    ],
)
def test_stochastic_rounding_has_no_bias(name: str, value: float) -> None:
    """The mean of many roundings is the number, within four standard errors of a coin with the same probability."""
    count = 200_000
    x = torch.full((count // 8, 8), value)
    random = random16(5, 1, 0, torch.arange(count // 8), 8)
    results = rounded(x, name, "stochastic", random).double()
    below, above = results.min(), results.max()
    exact = float(x[0, 0].double())
    assert float(below) < exact < float(above)
    assert results.unique().numel() == 2
    step = float(above - below)
    odds = (exact - float(below)) / step
    error = step * (odds * (1 - odds) / count) ** 0.5
    assert abs(float(results.mean()) - exact) < 4 * error + step * 2.0**-16


@pytest.mark.parametrize(("name", "step"), [("fp16", 2.0**-24), ("fp8_e4m3", 2.0**-9), ("fp8_e5m2", 2.0**-16)])
@pytest.mark.parametrize("share", [2.0**-18, 2.0**-17, 1.5 * 2.0**-16, 0.3, 0.5, 1 - 2.0**-17, 1 + 2.0**-16, 2.7])
def test_tiny_numbers_are_right_on_average(name: str, step: float, share: float) -> None:
    """The mean is right to half of what 16 bits resolve, for numbers of any size."""
    random = torch.arange(65536)[:, None]
    x = torch.full((65536, 1), share * step)
    mean = float(rounded(x, name, "stochastic", random).double().mean())
    assert abs(mean / step - float(x[0, 0]) / step) <= 2.0**-17


def test_fp32_is_not_rounded_and_random_numbers_are_required() -> None:
    x = torch.randn(3)
    assert rounded(x, "fp32", "stochastic") is x
    with pytest.raises(ValueError, match="needs random numbers"):
        rounded(x, "bf16", "stochastic")
