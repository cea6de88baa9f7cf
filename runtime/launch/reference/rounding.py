"""How new rows are rounded to narrow number formats, in plain torch, and the random numbers of stochastic rounding.

The generator is Philox4x32-10 (Salmon et al., 2011): a function of a key and a counter, so a random number depends only
on where it is used. `PHILOX_ROUNDS` in codegen/semantics.py says what the key and the counter are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.dtypes import FLOATS, Float
from embforge.codegen.rules.rule import Rounding
from embforge.codegen.semantics import PHILOX_ROUNDS
from embforge.number_formats import torch_dtype

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words per counter, each of 32 bits in an int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # wraps, but its 64 bits are right
        high0, high1 = product0 >> 32 & WORD, product1 >> 32 & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & WORD, high0 ^ c3 ^ k1, product0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def random16(seed: int, t: int, table: int, rows: Tensor, dim: int) -> Tensor:
    """16 random bits for every element of the rows at step `t`: int64 [n, dim]."""
    groups = torch.arange(-(-dim // 8), dtype=torch.int64, device=rows.device)
    shape = (rows.numel(), groups.numel())
    wide = rows.long()[:, None].expand(shape)
    counter = (groups.expand(shape), wide & WORD, (wide >> 32 | table << 8) & WORD, torch.full_like(wide, t & WORD))
    words = torch.stack(philox(counter, (seed & WORD, seed >> 32 & WORD)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.flatten(1)[:, :dim]


_CODES = {8: torch.uint8, 16: torch.int16}


def rounded(x: Tensor, dtype_name: str, rounding: Rounding, random: Tensor | None = None) -> Tensor:
    """Rounds fp32 numbers to the number format of a table. `random`, which stochastic rounding needs, has 16 random
    bits per number, as int64.

    Finite numbers never become infinite. Results keep the sign of `x`, also zeros; NaN has no sign.
    """
    form = FLOATS[dtype_name]
    if not form.is_narrow:
        return x
    if rounding == "stochastic" and random is None:
        raise ValueError(f"rounding={rounding!r} to {dtype_name} needs random numbers; pass random")
    chance = random if rounding == "stochastic" else None
    everything = x.contiguous().view(torch.int32).long() & WORD
    magnitude = everything & 0x7FFFFFFF
    result = _normal(magnitude, form, chance)
    if form.rebias:  # without a rebias, subnormal numbers are those of fp32 with fewer bits
        smallest = (form.rebias + 1) << 23
        result = torch.where(magnitude < smallest, _subnormal(x.abs() / form.smallest, chance), result)
    result = result.clamp(max=form.largest_code)
    result = result.masked_fill(x.isinf(), form.overflow)
    result = (everything >> 31 << form.bits - 1 | result).masked_fill(x.isnan(), form.nan)
    return result.to(_CODES[form.bits]).view(torch_dtype(form.name))


def _normal(magnitude: Tensor, form: Float, chance: Tensor | None) -> Tensor:
    """Rounds normal numbers: adds to the bits that are dropped; a carry may go into the exponent, which is right."""
    if chance is None:
        half = (1 << form.dropped - 1) - 1
        added = half + (magnitude >> form.dropped & 1)
    elif form.dropped > 16:
        added = chance << form.dropped - 16 | 1 << form.dropped - 17  # the middle of the range that 16 bits leave open
    else:
        added = chance >> 16 - form.dropped
    return (magnitude + added >> form.dropped) - (form.rebias << 23 - form.dropped)


def _subnormal(steps: Tensor, chance: Tensor | None) -> Tensor:
    """Rounds subnormal numbers: their bits are their size in steps of the smallest number."""
    if chance is None:
        return steps.round().long()  # half to even
    whole = steps.floor()
    # The middle of the range that 16 bits leave open: the mean of results is right to 2^-17 of a step.
    middle = chance.to(steps.dtype) + 0.5
    return whole.long() + ((steps - whole) * 65536 > middle)
