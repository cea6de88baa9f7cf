"""Every backend's stages between ranks give the reference's bits; only merged ids may have a different order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conformance import stage_cases as made
from conformance.backends import BACKENDS, device_of
from conformance.stage_cases import (
    NARROW,
    SELECTIONS,
    USUAL,
    Bucketed,
    Case,
    Feature,
    Piece,
    Split,
    bits,
    loaded,
)
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples
from torch import Tensor

from embforge.codegen.dtypes import WIRE
from embforge.codegen.poolings import SELECTING
from embforge.codegen.stages import ACTIONS, BOUNDS, MISTAKES, PACKINGS
from embforge.inputs import BOUNDS_CHECKS
from embforge.number_formats import torch_dtype

TESTED = [backend for backend in BACKENDS if backend != "reference"]
every_backend = pytest.mark.parametrize("backend", TESTED)
every_format = pytest.mark.parametrize("formats", [USUAL, NARROW], ids=["usual", "narrow"])


def bucketed(backend: str, case: Case, formats: Sequence[str]) -> Bucketed:
    """The case after `count`, and after `fill` if it has no mistake."""
    stages, result = loaded(backend, formats), made.bucketed(case, formats, device_of(backend))
    made.count(stages, result)
    result.counted = result.slots.cpu().clone()
    if result.pools is not None:
        result.counted_pools = result.pools.cpu().clone()
    if result.ok:
        made.fill(stages, result, formats)
    return result


def same_words(want: Bucketed, have: Bucketed, formats: Sequence[str]) -> None:
    """Compares what is sent: ids of merged streams in any order, everything else word by word."""
    for stream in want.sequence if want.case.merge else ():
        assert sorted(made.sent_ids(want, stream, formats)) == sorted(made.sent_ids(have, stream, formats))
        for one in (want, have):
            at, size = one.places[stream][0], made.sent_ids(one, stream, formats).numel()
            one.words[at : at + size * torch_dtype(formats[1]).itemsize // 4] = 0
    for stream in range(want.streams):
        lists = [made.samples_asked_for(one, stream) for one in (want, have)]
        assert sorted(lists[0]) == sorted(lists[1].cpu()), "the first bag that wants a pool asks for it"
        for asked in lists:
            asked.zero_()
    assert torch.equal(want.words, have.words.cpu())


def check_bucketed(backend: str, case: Case, formats: Sequence[str]) -> None:
    want, have = bucketed("reference", case, formats), bucketed(backend, case, formats)
    assert torch.equal(want.mistake, have.mistake.cpu())
    if not want.ok:
        return
    for name in ("lengths", "divisors", "header"):
        assert torch.equal(bits(getattr(want, name)), bits(getattr(have, name))), name
    if not case.merge:
        assert torch.equal(want.counted, have.counted)
    assert torch.equal(made.first_occurrences(want.counted), made.first_occurrences(have.counted))
    assert torch.equal(made.rows_at_slots(want, formats), made.rows_at_slots(have, formats))
    if case.asks:
        assert torch.equal(made.first_occurrences(want.counted_pools), made.first_occurrences(have.counted_pools))
        assert torch.equal(made.samples_of_pools(want), made.samples_of_pools(have))
    same_words(want, have, formats)


@every_backend
@given(case=made.cases())
@examples(40)
def test_ids_go_to_their_owners(backend: str, case: Case) -> None:
    check_bucketed(backend, case, USUAL)


@every_backend
@given(case=made.cases())
@examples(12)
def test_ids_go_to_their_owners_in_narrow_formats(backend: str, case: Case) -> None:
    check_bucketed(backend, case, NARROW)


@every_backend
def test_long_bags_and_many_shards(backend: str) -> None:
    rows = 6 * 10**9  # past 32 bits, so that they are divided as what they are
    features = (
        Feature(rows, "mean", (Split(3),), padding=0, weighted=True),
        Feature(rows, "sqrtn", (Split(70),), weighted=True),
        Feature(rows, "sum", (Split(1030, rows // 1030 + 1),)),
        Feature(50, "none", (Split(4),)),
        Feature(500, "mean", (Split(1), Split(5, 100)), padding=0),
    )
    lengths = (
        (4200, 63, 64, 65, 0, 1),
        (128, 4096, 129, 0, 2, 700),
        (40, 0, 1, 2, 3, 33),
        (300, 0, 1, 2, 0, 5),
        (0, 70, 1, 2, 0, 500),
    )
    for asks in (False, True):
        check_bucketed(backend, Case(features, lengths, seed=1, bounds=1, merge=1, bad=0.1, asks=asks), USUAL)


@every_backend
def test_many_samples(backend: str) -> None:
    features = (Feature(40, "sqrtn", (Split(5),), padding=1, weighted=True), Feature(40, "none", (Split(2),)))
    lengths = (tuple(i % 3 for i in range(1200)), tuple(i % 2 for i in range(1200)))
    check_bucketed(backend, Case(features, lengths, bad=0.1), USUAL)


@every_backend
def test_pools_of_many_samples(backend: str) -> None:
    """Bags of one id, many of which are equal, and also empty and longer bags; with one shard and with several."""
    features = (Feature(40, "sum", (Split(1), Split(5))), Feature(300, "max", (Split(2, 150),), padding=3))
    lengths = (tuple((0, 1, 1, 1, 2)[i % 5] for i in range(1200)), (1,) * 1200)
    case = Case(features, lengths, bad=0.05, asks=True)
    counted = bucketed("reference", case, USUAL)
    assert 40 < made.asked(counted, 0) < 400 and made.asked(counted, 6) < 150
    check_bucketed(backend, case, USUAL)


@every_backend
@given(
    asked=st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=5),
    widths=st.lists(st.sampled_from([2, 4, 6, 16, 48, 64, 260]), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@examples(12)
def test_gather_gives_the_references_bits(backend: str, asked: list[list[int]], widths: list[int], seed: int) -> None:
    row_bytes, first, to = sum(widths), 3, 2
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (first + 7, row_bytes), generator=generator, dtype=torch.uint8)
    picks, words = [], [made.FILLER]
    for number, samples in enumerate(asked):
        column = number % len(widths)
        place = [first, sum(widths[:column]), widths[column], len(words), len(samples), to]
        words += samples
        picks.append(place)
        to += widths[column] * len(samples) + 2 * (number % 3)
    arguments = {
        "picks": torch.tensor(picks),
        "words": torch.tensor(words, dtype=torch.int32),
        "rows": rows,
        "picked": torch.full((to,), made.FILLER, dtype=torch.uint8),
    }
    check(backend, USUAL, "gather", arguments | {"num_picks": len(picks), "row_bytes": row_bytes})


@every_backend
def test_gather_of_many_pools_gives_the_references_bits(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (900, 192), generator=generator, dtype=torch.uint8)
    asked = torch.randint(0, 900, (3000,), generator=generator, dtype=torch.int32)
    picks = torch.tensor([[0, 0, 128, 0, 2500, 0], [100, 128, 64, 2500, 500, 2500 * 128]])
    asked[2500:] %= 800
    picked = torch.zeros(2500 * 128 + 500 * 64, dtype=torch.uint8)
    arguments = {"picks": picks, "words": asked, "rows": rows, "picked": picked}
    check(backend, USUAL, "gather", arguments | {"num_picks": 2, "row_bytes": 192})


@every_backend
@pytest.mark.parametrize("feature", [0, 2])
def test_an_id_that_is_no_row_is_named(backend: str, feature: int) -> None:
    features = (Feature(10, "mean"), Feature(10, "sum", (Split(3),)), Feature(10, "none"))
    lengths = ((1, 2, 0), (1, 1, 1), (2, 0, 3))
    result = made.bucketed(Case(features, lengths, bounds=0), USUAL, device_of(backend))
    sample = {0: 1, 2: 2}[feature]
    result.given["values"][result.given["offsets"][feature * 3 + sample] + 1] = 10
    made.count(loaded(backend, USUAL), result)
    assert result.mistake.tolist() == [MISTAKES.index("BAD_ID") + 1, feature, sample, 1, 10]


@every_backend
def test_an_absent_id_is_no_mistake(backend: str) -> None:
    kinds = ("mean", (Split(1),), -1), ("sum", (Split(3),), 12), ("none", (Split(2),), -1), ("concat", (Split(1),), 99)
    features = tuple(Feature(10, pooling, splits, absent=absent, hotness=3) for pooling, splits, absent in kinds)
    found = []
    for tested in ("reference", backend):
        result = made.bucketed(Case(features, ((2, 1, 3),) * 4, bounds=0), USUAL, device_of(tested))
        for number, feature in enumerate(features):
            result.given["values"][6 * number + 1] = feature.absent
        made.count(loaded(tested, USUAL), result)
        assert result.ok
        found.append((result.header.cpu(), result.lengths.cpu(), result.divisors.cpu()))
    assert all(map(torch.equal, *found))
    result.given["values"][7] = -1  # the absent id of other features
    result.mistake.zero_()
    made.count(loaded(backend, USUAL), result)
    assert result.mistake.tolist() == [MISTAKES.index("BAD_ID") + 1, 1, 0, 1, -1]


@every_backend
@pytest.mark.parametrize(
    ("offsets", "wanted"),
    [
        ([1, 1, 2, 4, 6], ["BAD_OFFSET", 0, 0, 0, 1]),
        ([0, 5, 2, 4, 6], ["BAD_OFFSET", 0, 1, 2, 2]),
        ([0, 1, 2, 4, 5], ["BAD_OFFSET", 1, 1, 4, 5]),
        ([0, 1, 2, 2, 6], ["LONG_CONCAT", 1, 1, 3, 4]),
    ],
)
def test_the_first_mistake_in_offsets_is_reported(backend: str, offsets: list[int], wanted: list[Any]) -> None:
    features = (Feature(10, "mean"), Feature(10, "concat", hotness=3))
    result = made.bucketed(Case(features, ((1, 1), (2, 2)), bounds=0), USUAL, device_of(backend))
    result.given["offsets"].copy_(torch.tensor(offsets))
    made.count(loaded(backend, USUAL), result)
    kind, *rest = wanted
    assert result.mistake.tolist() == [MISTAKES.index(kind) + 1, *rest]


def run(backend: str, formats: Sequence[str], stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs a stage on copies of its arguments and returns the copies."""
    own = {k: v.clone().to(device_of(backend)) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    loaded(backend, formats).run(stage, **own)
    return own


def check(backend: str, formats: Sequence[str], stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Compares all tensors after a stage, both results and those that it must not change. Returns the reference's."""
    want, have = run("reference", formats, stage, arguments), run(backend, formats, stage, arguments)
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert torch.equal(bits(value), bits(have[name])), (stage, name)
    return want


lengths_of_segments = st.lists(st.integers(0, 5), max_size=40).map(tuple)


@every_backend
@every_format
@given(
    shapes=st.lists(st.tuples(st.booleans(), lengths_of_segments), max_size=5),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(8)
def test_regroup_gives_the_references_bits(
    backend: str, formats: Sequence[str], shapes: list[tuple[bool, tuple[int, ...]]], weighted: bool, seed: int
) -> None:
    # A segment with ids must have samples.
    shapes = [(sequence, lengths) for sequence, lengths in shapes if lengths or not sequence]
    check(backend, formats, "regroup", made.segments(seed, shapes, weighted, formats))


@every_backend
def test_regroup_of_many_samples_gives_the_references_bits(backend: str) -> None:
    lengths = tuple(int(n) for n in torch.randint(0, 3, (1500,), generator=torch.Generator().manual_seed(0)))
    check(backend, USUAL, "regroup", made.segments(0, [(False, lengths), (True, lengths)], True, USUAL))


pieces = st.builds(Piece, st.sampled_from([1, 3, 4, 8, 17, 40]), st.sampled_from(list(ACTIONS)), st.integers(1, 4))


@every_backend
@every_format
@given(
    batch=st.integers(0, 5),
    shapes=st.lists(pieces, min_size=1, max_size=4),
    gap=st.sampled_from([0, 1, 4, 8]),
    seed=st.integers(0, 99),
    keeps=st.booleans(),
    scaled=st.booleans(),
)
@examples(12)
def test_partial_pools_become_results_and_gradients_go_back(
    backend: str,
    formats: Sequence[str],
    batch: int,
    shapes: list[Piece],
    gap: int,
    seed: int,
    keeps: bool,
    scaled: bool,
) -> None:
    arguments = made.network(seed, batch, shapes, gap, formats)
    width, winner_width = arguments["output_width"], arguments["winner_width"]
    filled = torch.full((batch, winner_width), made.FILLER, dtype=torch.int32)
    pooled = torch.full((batch, width), float(made.FILLER), dtype=torch_dtype(formats[4]))
    kept = filled if keeps or not winner_width else None
    want = check(backend, formats, "network_forward", arguments | {"pooled": pooled, "winners": kept})
    if kept is None:
        return
    gradient = torch.randn(batch, width, generator=torch.Generator().manual_seed(seed)).to(pooled.dtype)
    partials = torch.full(arguments["partials"].shape, float(made.FILLER), dtype=torch_dtype(formats[3]))
    owned = torch.full(arguments["own_partials"].shape, float(made.FILLER), dtype=torch_dtype(formats[3]))
    more = {"grad_pooled": gradient, "winners": want["winners"], "partials": partials, "own_partials": owned}
    more["factor"] = torch.tensor([1 / 3]) if scaled else None
    del arguments["pools"]
    check(backend, formats, "network_backward", arguments | more)


@every_backend
def test_selections_of_nan_and_infinities_have_the_references_bits(backend: str) -> None:
    pieces = [Piece(5, combiner.name, 4) for combiner in SELECTING.values()]
    arguments = made.network(3, 6, [*pieces, Piece(4, "sum", 1)], 0, USUAL)
    arguments["partials"][::3] = torch.nan
    arguments["partials"][1::6], arguments["partials"][4::6] = -torch.inf, torch.inf
    width = 5 * len(pieces)
    more = {"pooled": torch.zeros(6, width + 4), "winners": torch.zeros(6, width, dtype=torch.int32)}
    check(backend, USUAL, "network_forward", arguments | more)


@every_backend
def test_a_library_with_one_selection_gives_the_same_bits(backend: str) -> None:
    """The last selection is checked, because programs that select nothing have the first."""
    *_, last = SELECTIONS
    arguments = made.network(3, 6, [Piece(5, last, 4), Piece(4, "sum", 2)], 0, USUAL)
    results = {"pooled": torch.zeros(6, 9), "winners": torch.zeros(6, 5, dtype=torch.int32)}
    want = run("reference", USUAL, "network_forward", arguments | results)
    own = {k: v.clone().to(device_of(backend)) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    have = {name: torch.zeros_like(want[name], device=device_of(backend)) for name in ("pooled", "winners")}
    loaded(backend, USUAL, (last,)).run("network_forward", **own, **have)
    for name, result in have.items():
        assert torch.equal(bits(want[name]), bits(result)), name


@every_backend
@pytest.mark.parametrize("packing", PACKINGS)
@given(
    widths=st.lists(st.sampled_from([1, 4, 7, 64, 150]), min_size=1, max_size=3),
    rows=st.integers(0, 4),
    seed=st.integers(0, 99),
    size=st.sampled_from(
        [1.0, 1e4, 1e-38, 2e-43]
    ),  # denormal ones too, whose scale is so coarse that numbers exceed it
)
@examples(12)
def test_packed_rows_have_the_references_bits(
    backend: str, packing: str, widths: list[int], rows: int, seed: int, size: float
) -> None:
    parts, column, byte = [], 0, 0
    for width in widths:
        parts.append([column, width, byte])
        column, byte = column + width, byte + 4 + -(-width // 4) * 4
    numbers = torch.randn(rows, column, generator=torch.Generator().manual_seed(seed)) * size
    if rows > 1:
        numbers[0] = 0
        numbers[1, 0] = torch.inf
    sizes = {"num_parts": len(parts), "rows": rows, "width": column, "row_bytes": byte, "packing": PACKINGS[packing]}
    arguments = {"parts": torch.tensor(parts), "numbers": numbers, **sizes}
    empty = torch.full((rows, byte), made.FILLER, dtype=torch.uint8)
    packed = check(backend, USUAL, "pack", arguments | {"bytes": empty})
    blank = torch.full_like(numbers, float(made.FILLER))
    check(backend, USUAL, "unpack", arguments | {"bytes": packed["bytes"], "numbers": blank})


@every_backend
@pytest.mark.parametrize(("packing", "largest"), [("int8", 127.0), ("fp8", 448.0)])
def test_packing_rounds_ties_and_coarse_scales_as_the_reference(backend: str, packing: str, largest: float) -> None:
    halves = [largest, 0.5, 1.5, -2.5, 17.0, 19.0, -21.0, -0.0]  # with a scale of 1
    tiny = [-largest, *(n * 2.0**-10 for n in (1, 3, 5, -7, 15, 17, 19))]  # among fp8's subnormals, and above
    coarse = [
        largest * 1.4 * n * 2.0**-149 for n in (-1, 1, 0.5, -0.5, 0, -1, 1, 0.01)
    ]  # the scale is the least number
    numbers = torch.tensor([halves, tiny, coarse])
    sizes = {"num_parts": 1, "rows": 3, "width": 8, "row_bytes": 12, "packing": PACKINGS[packing]}
    blank = torch.full((3, 12), made.FILLER, dtype=torch.uint8)
    arguments = {"parts": torch.tensor([[0, 8, 0]]), "numbers": numbers, "bytes": blank, **sizes}
    packed = check(backend, USUAL, "pack", arguments)["bytes"]
    assert packed[:, :4].contiguous().view(torch.float32).flatten().tolist() == [1.0, 1.0, 2.0**-149]
    back = check(backend, USUAL, "unpack", arguments | {"bytes": packed, "numbers": torch.zeros(3, 8)})["numbers"]
    assert back[0, :1].tolist() == [largest] and back[0, 7] == 0


@every_backend
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_byte_is_unpacked(backend: str, packing: str) -> None:
    row = torch.cat([torch.tensor([0.5]).view(torch.uint8), torch.arange(256, dtype=torch.int32).to(torch.uint8)])
    sizes = {"num_parts": 1, "rows": 1, "width": 256, "row_bytes": 260, "packing": PACKINGS[packing]}
    arguments = {"parts": torch.tensor([[0, 256, 0]]), "bytes": row[None], "numbers": torch.zeros(1, 256), **sizes}
    found = check(backend, USUAL, "unpack", arguments)["numbers"][0]
    wanted = row[4:].view(torch_dtype(WIRE[packing].name)).float() / 2
    assert torch.equal(found.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
    assert torch.equal(found.isnan(), wanted.isnan())


def test_stages_number_bounds_checks_as_modules_do() -> None:
    assert BOUNDS == BOUNDS_CHECKS
