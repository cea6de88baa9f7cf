"""What the kernels of the stages between ranks compute on one backend, as digests by stage and result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from baseline.digests import Digests, digests_of
from baseline.drawing import Numbers
from baseline.internals import stage_cases as made

FORMATS = {"usual": made.USUAL, "narrow": made.NARROW}
SPLITS = (made.Split(2), made.Split(3, 14), made.Split(5))
FEATURES = (
    made.Feature(40, "sum", SPLITS[:2], padding=0),
    made.Feature(40, "mean", SPLITS[1:], padding=3, weighted=True),
    made.Feature(40, "sqrtn", (SPLITS[0], SPLITS[2]), weighted=True),
    made.Feature(40, "none", SPLITS[:1]),
    made.Feature(40, "concat", SPLITS[2:], hotness=9),
    made.Feature(40, "mean", ()),
    made.Feature(40, "sum", (made.Split(1),), absent=-1),
)
LENGTHS = tuple(tuple((sample * (place + 2)) % 7 for sample in range(33)) for place in range(len(FEATURES)))


def stage_results(backend: str, formats: Sequence[str]) -> Digests:
    """Every stage on a few inputs."""
    found = [_bucketing(backend, formats, plain=True), _bucketing(backend, formats, plain=False)]
    lengths = LENGTHS[2]
    regrouped = made.segments(5, [(False, lengths), (True, lengths), (False, ()), (False, (2, 0, 5))], True, formats)
    found.append(_run(backend, formats, "regroup", regrouped, ("values", "offsets", "weights")))
    found.append(_gathered(backend, formats))
    found.extend(_network(backend, formats))
    for packing in (0, 1):
        found.append(_packed(backend, formats, packing))
    return digests_of(found)


def _run(
    backend: str, formats: Sequence[str], stage: str, arguments: dict[str, Any], results: Sequence[str]
) -> dict[str, Tensor]:
    """Runs a stage on copies of its arguments and returns the named ones as the stage left them."""
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    made.loaded(backend, formats).run(stage, **own)
    return {f"{stage}: {name}": own[name] for name in results}


def _bucketing(backend: str, formats: Sequence[str], *, plain: bool) -> dict[str, Tensor]:
    """`count` and `fill`. If equal ids are merged and single pools requested, their order is not defined; then only
    values that do not depend on it count."""
    case = made.Case(FEATURES, LENGTHS, seed=4, bounds=1, merge=int(not plain), bad=0.1, asks=not plain)
    result = made.bucketed(case, formats)
    stages = made.loaded(backend, formats)
    made.count(stages, result)
    result.counted = result.slots.clone()
    if result.pools is not None:
        result.counted_pools = result.pools.clone()
    made.fill(stages, result, formats)
    found = {"count: lengths": result.lengths, "count: divisors": result.divisors, "count: header": result.header}
    if plain:
        return {**found, "count: slots": result.counted, "fill: words": result.words, "fill: slots": result.slots}
    return {
        **found,
        "count, merged: slots": made.first_occurrences(result.counted),
        "fill, merged: rows": made.rows_at_slots(result, formats),
        "count, asking: pools": made.first_occurrences(result.counted_pools),
        "fill, asking: pools": made.samples_of_pools(result),
    }


def _gathered(backend: str, formats: Sequence[str]) -> dict[str, Tensor]:
    numbers = Numbers(6)
    rows, asked = numbers.whole(50 * 96, 256).to(torch.uint8).reshape(50, 96), numbers.whole(70, 40).to(torch.int32)
    picks = torch.tensor([[0, 0, 64, 0, 60, 0], [10, 64, 32, 60, 10, 60 * 64]])
    picked = torch.zeros(60 * 64 + 10 * 32, dtype=torch.uint8)
    arguments = {"picks": picks, "words": asked, "rows": rows, "picked": picked, "num_picks": 2, "row_bytes": 96}
    return _run(backend, formats, "gather", arguments, ("picked",))


def _network(backend: str, formats: Sequence[str]) -> list[dict[str, Tensor]]:
    numbers, batch = Numbers(7), 9
    pieces = [made.Piece(5, "max", 4), made.Piece(8, "sum", 3), made.Piece(17, "divide", 2), made.Piece(1, "sum", 1)]
    arguments = made.network(3, batch, pieces, 1, formats)
    for name in ("partials", "own_partials"):  # halves, so that maxima have ties
        tensor = arguments[name]
        drawn = (numbers.real(tensor.numel()) * 4).round() / 2
        drawn[:: 1 + tensor.numel() // 5] = torch.nan
        arguments[name] = drawn.to(tensor.dtype)
    width, winner_width = arguments["output_width"], arguments["winner_width"]
    pooled = torch.zeros(batch, width, dtype=made.torch_dtype(formats[4]))
    winners = torch.zeros(batch, winner_width, dtype=torch.int32)
    forward = {**arguments, "pooled": pooled, "winners": winners}
    found = _run(backend, formats, "network_forward", forward, ("pooled", "winners"))
    backward = {
        **{name: value for name, value in arguments.items() if name != "pools"},
        "grad_pooled": numbers.real(batch, width).to(pooled.dtype),
        "winners": found["network_forward: winners"],
        "partials": torch.zeros(arguments["partials"].shape, dtype=made.torch_dtype(formats[3])),
        "own_partials": torch.zeros(arguments["own_partials"].shape, dtype=made.torch_dtype(formats[3])),
        "factor": torch.tensor([0.375]),
    }
    return [found, _run(backend, formats, "network_backward", backward, ("partials", "own_partials"))]


def _packed(backend: str, formats: Sequence[str], packing: int) -> dict[str, Tensor]:
    numbers, widths = Numbers(8), (1, 4, 7, 64)
    parts, column, byte = [], 0, 0
    for width in widths:
        parts.append([column, width, byte])
        column, byte = column + width, byte + 4 + -(-width // 4) * 4
    rows = numbers.real(5, column)
    rows[0], rows[1, 0], rows[2] = 0, torch.inf, rows[2] * 2.0**-140
    sizes = {"num_parts": len(parts), "rows": 5, "width": column, "row_bytes": byte, "packing": packing}
    arguments = {"parts": torch.tensor(parts), "numbers": rows, "bytes": torch.zeros(5, byte, dtype=torch.uint8)}
    packed = _run(backend, formats, "pack", {**arguments, **sizes}, ("bytes",))
    back = {**arguments, **sizes, "bytes": packed["pack: bytes"], "numbers": torch.zeros(5, column)}
    return {**packed, **_run(backend, formats, "unpack", back, ("numbers",))}
