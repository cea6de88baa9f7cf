"""Inputs of the stages between ranks, made as the metadata arrays that kernels read; and every stage's call on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from conformance.backends import device_of
from hypothesis import strategies as st
from torch import Tensor

from embforge.backends import arch_of
from embforge.codegen import stages as words
from embforge.codegen.poolings import POOLINGS, SELECTING
from embforge.codegen.stages import ABSENT, ACTIONS, StagePlan
from embforge.launch.stage_calls import Stages
from embforge.launch.stages import stages_of
from embforge.number_formats import torch_dtype

USUAL = ("int64", "int32", "fp32", "fp32", "fp32")
NARROW = ("int32", "int64", "bf16", "fp16", "bf16")
SELECTIONS = tuple(combiner.name for combiner in SELECTING.values())
"""One library for all pieces that tests draw."""
FILLER = 77
"""Results are filled with this before a stage runs, so that tests see a word that is written too much or too few."""


def loaded(backend: str, formats: Sequence[str], selecting: tuple[str, ...] = SELECTIONS) -> Stages:
    """A backend's stages for these formats of ids, wire ids, partial pools, gradients and results."""
    arch = "any" if backend == "reference" else arch_of(backend, device_of(backend))
    return stages_of(StagePlan(backend, arch, *formats, selecting))


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits, with all NaNs made equal."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    plain = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return plain.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@dataclass(frozen=True)
class Split:
    """One way to split a feature's rows over shards: blocks of `block` rows, or by modulo if `block` is 0."""

    shards: int
    block: int = 0


@dataclass(frozen=True)
class Feature:
    """A feature. Without a split its ids are checked and not sent."""

    rows: int
    pooling: str = "sum"
    splits: tuple[Split, ...] = (Split(2),)
    padding: int = -1
    base: int = 0
    hotness: int = 0
    weighted: bool = False
    absent: int = 0

    @property
    def sequence(self) -> bool:
        return not POOLINGS[self.pooling].pooled


@dataclass(frozen=True)
class Case:
    """A batch: `lengths` of every feature's bags, ids (some of them no rows) drawn by a seed."""

    features: tuple[Feature, ...]
    lengths: tuple[tuple[int, ...], ...]
    seed: int = 0
    bounds: int = 1
    merge: int = 0
    weights: bool = True
    bad: float = 0.0
    """How many of the ids are no rows."""
    asks: bool = False
    """Whether most pooled streams count the pools that they would request, and most of these then request them."""

    @property
    def batch(self) -> int:
        return len(self.lengths[0])


@st.composite
def features(draw: st.DrawFn) -> Feature:
    rows = draw(st.sampled_from([1, 5, 40, 1000]))
    shards = st.integers(1, 5)
    by_block = shards.flatmap(lambda n: st.just(Split(n, -(-rows // n))))
    splits = draw(st.lists(st.one_of(st.builds(Split, shards), by_block), max_size=2))
    pooling = draw(st.sampled_from(["sum", "mean", "sqrtn", "none", "concat"]))
    weighted = pooling not in ("none", "concat") and draw(st.booleans())
    padding = draw(st.sampled_from([-1, 0, rows - 1]))
    # A base takes rows past the last shard of a split by blocks, which a caller must never do.
    base = draw(st.sampled_from([0, 3])) if all(split.block == 0 for split in splits) else 0
    return Feature(rows, pooling, tuple(splits), padding, base, 9 if pooling == "concat" else 0, weighted)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chosen = draw(st.lists(features(), min_size=1, max_size=4))
    batch = draw(st.integers(0, 40)) if draw(st.booleans()) else draw(st.integers(0, 3))
    longest = draw(st.sampled_from([0, 1, 3, 9]))
    lengths = [draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch)) for _ in chosen]
    bounds, bad = draw(st.sampled_from([(0, 0.0), (1, 0.0), (1, 0.2), (2, 0.0)]))
    merge, weights, asks = draw(st.integers(0, 1)), draw(st.booleans()), draw(st.booleans())
    return Case(tuple(chosen), tuple(map(tuple, lengths)), draw(st.integers(0, 99)), bounds, merge, weights, bad, asks)


@dataclass
class Bucketed:
    """A case as the arguments of `count` and `fill`, and their results."""

    case: Case
    given: dict[str, Any]
    lengths: Tensor
    slots: Tensor
    pools: Tensor | None
    divisors: Tensor
    header: Tensor
    mistake: Tensor
    sequence: dict[int, int]
    """For each stream whose rows are sent one by one: its bucketing."""
    sending: int
    """The number of bucketings whose ids are sent; they come first."""
    streams: int
    """The number of streams of these bucketings."""
    counted: Tensor = field(default_factory=lambda: torch.empty(0))
    """`slots` as `count` left them."""
    counted_pools: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    words: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def ok(self) -> bool:
        return int(self.mistake[0]) == 0


def bucketed(case: Case, formats: Sequence[str], device: torch.device | str = "cpu") -> Bucketed:
    """The metadata and the batch of a case, before `count` and `fill`."""
    feature_rows, bucketings, shard_streams, streams = [], [], [], []
    sequence: dict[int, int] = {}
    divisor_width = length_rows = 0
    for index, feature in enumerate(case.features):
        divides = int(POOLINGS[feature.pooling].divisor or 0)
        known = (feature.rows, feature.padding, feature.base, divides, divisor_width, feature.hotness)
        feature_rows.append([*known, int(feature.weighted), feature.absent])
        divisor_width += bool(divides)
        for layer, split in enumerate(feature.splits):
            first = len(shard_streams)
            for _ in range(split.shards):
                shard_streams.append(len(streams))
                row = -1 if feature.sequence else length_rows
                if feature.sequence:
                    sequence[len(streams)] = len(bucketings)
                length_rows += not feature.sequence
                streams.append([len(words.HEADER_WORDS) + len(streams), row, int(feature.weighted), -1])
            bucketings.append([index, split.shards, split.block, first, int(feature.sequence), layer, int(layer == 0)])
    sending, sent = len(bucketings), len(streams)
    for index, feature in enumerate(case.features):
        if not feature.splits:
            bucketings.append([index, 1, 0, len(shard_streams), 0, 0, 1])
            shard_streams.append(len(streams))
            streams.append([len(words.HEADER_WORDS) + len(streams), length_rows, 0, -1])
            length_rows += 1
    for number, stream in enumerate(streams[:sent] if case.asks else ()):
        if stream[1] >= 0 and number % 4 != 3:
            stream[3] = len(words.HEADER_WORDS) + len(streams) + number
    id_dtype, generator = torch_dtype(formats[0]), torch.Generator().manual_seed(case.seed)
    known_lengths = zip(case.features, case.lengths, strict=True)
    ids = [_ids(feature, sum(lengths), case, generator) for feature, lengths in known_lengths]
    values = torch.cat(ids).to(id_dtype)
    offsets = torch.tensor([0, *accumulate(n for row in case.lengths for n in row)], dtype=id_dtype)
    weights = torch.rand(values.numel(), generator=generator) * 2 - 0.5 if case.weights else None
    layers = max((len(f.splits) for f in case.features if f.sequence), default=0)
    given = {
        "features": _words(feature_rows, device),
        "bucketings": _words(bucketings, device),
        "shard_streams": _words(shard_streams, device),
        "streams": _words(streams, device),
        "values": values.to(device),
        "offsets": offsets.to(device),
        "weights": None if weights is None else weights.to(device),
        "num_features": len(case.features),
        "num_bucketings": len(bucketings),
        "batch": case.batch,
        "num_values": values.numel(),
        "bounds": case.bounds,
        "merge": case.merge,
    }
    return Bucketed(
        case,
        given,
        torch.full((length_rows, case.batch), FILLER, dtype=torch.int32, device=device),
        torch.full((layers, values.numel()), FILLER, dtype=torch.int32, device=device),
        torch.full((length_rows, case.batch), FILLER, dtype=torch.int32, device=device) if case.asks else None,
        torch.full((case.batch, divisor_width), float(FILLER), device=device),
        torch.full((len(words.HEADER_WORDS) + 2 * len(streams),), FILLER, dtype=torch.int64, device=device),
        torch.full((5,), FILLER, dtype=torch.int64, device=device),
        sequence,
        sending,
        sent,
    )


def _ids(feature: Feature, count: int, case: Case, generator: torch.Generator) -> Tensor:
    ids = (torch.rand(count, generator=generator) ** 3 * feature.rows).long().clamp(max=feature.rows - 1)
    bad = torch.rand(count, generator=generator) < case.bad
    wrong = torch.where(torch.rand(count, generator=generator) < 0.5, -1 - ids, feature.rows + ids)
    return torch.where(bad, wrong, ids)


def _words(rows: Sequence[Any], device: torch.device | str) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def count(stages: Stages, made: Bucketed) -> None:
    results = {name: getattr(made, name) for name in ("lengths", "slots", "pools", "divisors", "header", "mistake")}
    stages.run("count", **made.given, **results, divisor_width=made.divisors.shape[1])


def fill(stages: Stages, made: Bucketed, formats: Sequence[str]) -> None:
    """Calls `fill`, with places for words that follow from the counts, and gaps between all of them."""
    step = torch_dtype(formats[1]).itemsize // 4
    made.counts = made.header[len(words.HEADER_WORDS) :].tolist()[: made.streams]
    at, base = 2, 0
    for stream, total in enumerate(made.counts):
        lengths_at = at + -(-total * step // 2) * 2 + 2
        weights_at = lengths_at + made.case.batch + 1
        asked_at = weights_at + total + 1
        asks = asked(made, stream) > 0 and stream % 5 != 4
        made.places.append([at, lengths_at, weights_at, base, asked_at if asks else -1])
        at = (asked_at + asked(made, stream) + 3) // 2 * 2
        base += total if stream in made.sequence else 0
    made.words = torch.full((at,), FILLER, dtype=torch.int32, device=made.header.device)
    given = made.given | {"num_bucketings": made.sending}
    stages.run(
        "fill", **given, lengths=made.lengths, slots=made.slots, pools=made.pools, words=made.words,
        places=_words(made.places, made.header.device),
    )  # fmt: skip


def asked(made: Bucketed, stream: int) -> int:
    """How many pools a stream requests."""
    at = int(made.given["streams"][stream, words.STREAM_WORDS.index("asked_at")])
    return int(made.header[at]) if at >= 0 else 0


def samples_asked_for(made: Bucketed, stream: int) -> Tensor:
    """The samples whose pools a stream requests; none if all pools are sent back."""
    at = made.places[stream][words.PLACE_WORDS.index("asked_at")]
    return made.words[at : at + asked(made, stream)] if at >= 0 else made.words[:0]


def samples_of_pools(made: Bucketed) -> Tensor:
    """For every (stream, sample): the sample whose pool it gets. Entries without a pool, and those of streams that do
    not request pools in the end, are unchanged."""
    assert made.pools is not None
    found = made.pools.cpu().clone()
    for stream in range(made.streams):
        row = int(made.given["streams"][stream, words.STREAM_WORDS.index("length_row")])
        samples = samples_asked_for(made, stream).cpu()
        if len(samples):
            found[row] = torch.where(found[row] < 0, found[row], samples[found[row].clamp_min(0).long()])
        elif row >= 0:
            assert torch.equal(found[row], made.counted_pools[row])
            found[row] = first_occurrences(found[row])
    return found


def sent_ids(made: Bucketed, stream: int, formats: Sequence[str]) -> Tensor:
    """The ids of a stream in the form in which they are sent."""
    dtype = torch_dtype(formats[1])
    at = made.places[stream][0]
    return made.words[at : at + made.counts[stream] * dtype.itemsize // 4].cpu().clone().view(dtype)


def rows_at_slots(made: Bucketed, formats: Sequence[str]) -> Tensor:
    """For every (layer, position): the row at its slot, made different for different streams. Entries without a slot
    are unchanged."""
    rows = [sent_ids(made, stream, formats).long() + 10_000 * (stream + 1) for stream in sorted(made.sequence)]
    known = torch.cat([*rows, torch.zeros(1, dtype=torch.int64)])
    slots = made.slots.cpu().long()
    covered = torch.zeros_like(slots, dtype=torch.bool)
    borders = made.given["offsets"].tolist()
    for index, feature in enumerate(made.case.features):
        if feature.sequence:
            begin, end = borders[index * made.case.batch], borders[(index + 1) * made.case.batch]
            covered[: len(feature.splits), begin:end] = True
    found = covered & (slots >= 0)
    return torch.where(found, known[torch.where(found, slots, 0)], slots)


def first_occurrences(slots: Tensor) -> Tensor:
    """For each id: whether it is sent here, was sent before, or is absent, without regard to its slot's number."""
    slots = slots.cpu()
    return torch.where(slots == ABSENT, 2, (slots >= 0).long())


# ---- regroup --------------------------------------------------------------------------------------------------------


def segments(seed: int, shapes: Sequence[tuple[bool, tuple[int, ...]]], weighted: bool, formats: Sequence[str]) -> Any:
    """Arguments of `regroup`: for each segment whether it is a sequence, and the lengths of its bags."""
    dtype, generator = torch_dtype(formats[1]), torch.Generator().manual_seed(seed)
    step = dtype.itemsize // 4
    received, rows, to, border = [torch.full((2,), FILLER, dtype=torch.int32)], [], 0, 1
    for sequence, lengths in shapes:
        total, samples = sum(lengths), len(lengths)
        ids = torch.randint(0, 2**31 - 1, (total,), generator=generator, dtype=torch.int64).to(dtype)
        begin = sum(part.numel() for part in received)
        lengths_from = begin + total * step
        weights_from = lengths_from + samples
        gap = 2 - (weights_from + total) % 2
        weights = torch.rand(total, generator=generator)
        received += [ids.view(torch.int32), torch.tensor(lengths, dtype=torch.int32), weights.view(torch.int32)]
        received.append(torch.full((gap,), FILLER, dtype=torch.int32))
        places = (-1 if sequence else lengths_from, samples, border, weights_from if weighted and not sequence else -1)
        rows.append([begin, total, to, *places])
        to, border = to + total, border + samples
    return {
        "segments": _words(rows, "cpu"),
        "words": torch.cat(received),
        "values": torch.full((to + 1,), FILLER, dtype=dtype),
        "offsets": torch.full((border + 1,), FILLER, dtype=dtype),
        "weights": torch.full((to + 1,), float(FILLER)) if weighted else None,
        "num_segments": len(rows),
    }


# ---- partial pools ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Columns of a result, and the number of partial pools that are combined to them."""

    width: int
    action: str
    sources: int


def network(seed: int, batch: int, pieces: Sequence[Piece], gap: int, formats: Sequence[str]) -> dict[str, Any]:
    """Arguments of both network stages. Every source has a block of its own, with `gap` columns on both sides."""
    generator = torch.Generator().manual_seed(seed)
    piece_rows, source_rows = [], []
    column = winner = divisor = block = own_block = 0
    for piece in pieces:
        piece_rows.append(
            [column, piece.width, ACTIONS[piece.action], divisor, len(source_rows), piece.sources, winner]
        )
        for _ in range(piece.sources):
            own, asked = len(source_rows) % 3 == 2, len(source_rows) % 3 == 1
            place = [own_block if own else block, piece.width + 2 * gap, gap, len(source_rows)]
            source_rows.append([*place, int(own), int(asked)])
            size = batch * (piece.width + 2 * gap)
            block, own_block = block + (0 if own else size), own_block + (size if own else 0)
        column += piece.width
        winner += piece.width if ACTIONS[piece.action] in SELECTING else 0
        divisor += piece.action == "divide"
    numbers = torch.randn(block + 1, generator=generator).mul(8).round().div(4)  # so that selections have ties
    numbers[::7] = torch.randn(numbers[::7].shape, generator=generator)
    owned = torch.randn(own_block + 1, generator=generator).mul(8).round().div(4)
    divisors = torch.randint(0, 5, (batch, divisor), generator=generator).float().sqrt()
    lengths = torch.randint(0, 3, (len(source_rows), batch), generator=generator, dtype=torch.int32)
    pools = torch.randint(0, max(1, batch), lengths.shape, generator=generator, dtype=torch.int32)
    return {
        "pieces": _words(piece_rows, "cpu"),
        "sources": _words(source_rows, "cpu"),
        "lengths": lengths,
        "pools": torch.where(lengths == 0, -1, pools),
        "divisors": divisors,
        "partials": numbers.to(torch_dtype(formats[2])),
        "own_partials": owned.to(torch_dtype(formats[2])),
        "num_pieces": len(pieces),
        "batch": batch,
        "output_width": column,
        "divisor_width": divisor,
        "winner_width": winner,
    }
