"""Difficult batches and tables, on which `verify` and the tests run a backend.

A case says how to draw a batch: the same case and seed give the same numbers on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import TableLayout, layout_of
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.number_formats import torch_computes, torch_dtype

USUAL_LENGTH = 4
"""The mean number of ids in a bag of a feature whose spec has no hotness."""
EDGE_LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129)
"""Lengths of bags around the chunk size of the canonical sum."""
LONG = 5000
"""The length of a bag with more than 64 chunks, so that the canonical sum has three levels."""
VERY_LONG = 300_000
"""The length of a bag with more than 64 * 64 chunks, so that the canonical sum has four levels."""
SPLIT = 300
"""The length of a bag that a CUDA kernel may split over blocks."""


class Longest(NamedTuple):
    """The length of the longest bag of a pooled feature."""

    ids: int
    most_bytes: float
    """Only the first feature of its pooling, weighting and dtype has `ids` ids, and only if their rows have at most
    this many bytes as float32."""
    otherwise: int
    """The length in all other features."""


LONGEST = {
    "split": Longest(LONG, 2 << 20, SPLIT),
    "deep": Longest(LONG, math.inf, LONG),
    "long": Longest(VERY_LONG, 64 << 20, LONG),
}
"""The longest bag for `Case.lengths`. One bag of each pooled feature has this length."""


@dataclass(frozen=True)
class Case:
    """How to draw one batch. `batch`: its number of samples."""

    batch: int
    lengths: Literal["usual", "one", "none", "edges", "split", "deep", "long"] = "usual"
    ids: Literal["uniform", "zipf", "same"] = "uniform"
    id_dtype: str = "int64"
    weights: Literal["absent", "normal", "special"] = "normal"
    bad_ids: bool = False

    def __str__(self) -> str:
        words = [f"B={self.batch}", f"{self.lengths} lengths", f"{self.ids} {self.id_dtype} ids"]
        words += [f"{self.weights} weights"] if self.weights != "normal" else []
        return ", ".join(words + ["bad ids"] * self.bad_ids)


class Drawn(NamedTuple):
    """A batch that was drawn for a case: ids, offsets and weights as `normalise` returns them."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None


def draw_batch(spec: CollectionSpec, case: Case, seed: int, device: str | torch.device = "cpu") -> Drawn:
    """Draws the batch of a case. Numbers are drawn on the CPU, so that they are the same for every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    dtype = torch_dtype(case.id_dtype)
    lengths, ids, kinds = [], [], set[tuple[object, ...]]()
    for feature in spec.features:
        table = spec.table(feature.table)
        of_feature = _lengths(feature, table, case, generator)
        kind = (feature.pooling, feature.weighted, table.dtype)
        if case.lengths in LONGEST and case.batch and feature.kind.pooled:
            longest = LONGEST[case.lengths]
            fits = kind not in kinds and longest.ids * table.embedding_dim * 4 <= longest.most_bytes
            of_feature[_below(case.batch, 1, generator)] = longest.ids if fits else longest.otherwise
            kinds.add(kind)
        lengths.append(of_feature)
        ids.append(_ids(feature, table, case, int(of_feature.sum()), generator))
    values = torch.cat(ids)
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    weights = None if case.weights == "absent" else _normal((values.numel(),), generator)
    if weights is not None and case.weights == "special":
        _sprinkle(weights, (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30), 0.5, generator)
    return Drawn(values.to(device, dtype), offsets.to(device, dtype), None if weights is None else weights.to(device))


def _lengths(feature: FeatureSpec, table: TableSpec, case: Case, generator: torch.Generator) -> Tensor:
    if case.lengths in ("one", "none"):
        return torch.full((case.batch,), 1 if case.lengths == "one" else 0, dtype=torch.int64, device="cpu")
    if case.lengths == "edges":
        edges = torch.tensor(EDGE_LENGTHS, dtype=torch.int64, device="cpu")
        lengths = edges[_below(len(EDGE_LENGTHS), case.batch, generator)]
    else:  # geometric: many short and empty bags, and a few that are much longer than the mean
        chance = 1.0 / (1 + (feature.hotness or USUAL_LENGTH))
        even = torch.rand(case.batch, generator=generator, dtype=torch.float64, device="cpu")
        lengths = (even.neg().log1p() / math.log(1.0 - chance)).long()
    return lengths.clamp(max=feature.slots) if feature.slots else lengths


def _ids(feature: FeatureSpec, table: TableSpec, case: Case, count: int, generator: torch.Generator) -> Tensor:
    rows = table.num_embeddings
    if case.ids == "uniform":
        ids = _below(rows, count, generator)
    elif case.ids == "zipf":  # log-uniform ranks: Zipf's law with exponent 1
        even = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
        ids = ((even * math.log(rows + 1)).exp() - 1).long().clamp(max=rows - 1)
    else:
        ids = _below(rows, 1, generator).expand(count).clone()
    if feature.padding_idx is not None:
        _sprinkle(ids, (feature.padding_idx,), 0.1, generator)
    if case.bad_ids:
        furthest = torch.iinfo(torch_dtype(case.id_dtype))
        _sprinkle(ids, (-1, rows, rows + 7, furthest.min, furthest.max), 0.2, generator)
    return ids


def draw_tables(
    spec: CollectionSpec, seed: int, special: bool = False, device: str | torch.device = "cpu"
) -> tuple[Tensor, ...]:
    """Draws tables in the spec's layout with random rows; with `special` also NaN, infinities, -0.0 and denormals.

    All bits between rows are ones, which is a NaN in every format, so that a kernel that reads them has wrong results.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return tuple(_table(table_layout, special, generator, device) for table_layout in layout_of(spec).tables)


def _table(table_layout: TableLayout, special: bool, generator: torch.Generator, device: str | torch.device) -> Tensor:
    table, dtype = table_layout.table, torch_dtype(table_layout.table.dtype)
    raw = torch.full((table.num_embeddings, table_layout.stride_bytes), 255, dtype=torch.uint8, device="cpu")
    rows = raw.view(dtype)[:, : table.embedding_dim]
    if special or not torch_computes(dtype):
        numbers = _normal(rows.shape, generator)
        if special:
            _sprinkle(numbers.view(-1), (0.0, -0.0, 1e-40, -1e-42, 2e-5, 3e38, 6e4), 0.1, generator)
            _sprinkle(numbers.view(-1), (torch.inf, -torch.inf, torch.nan), 0.005, generator)
            # Rows whose largest number is often a zero of either sign, and rows whose smallest number is.
            numbers[::4], numbers[2::4] = -numbers[::4].abs(), numbers[2::4].abs()
            _sprinkle(numbers[::2], (0.0, -0.0), 0.5, generator)
        rows.copy_(numbers)
    else:
        rows.uniform_(-1, 1, generator=generator)
    return raw.to(device).view(dtype)[:, : table.embedding_dim]  # moved with the padding, or the stride would be lost


def _below(limit: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(limit, (count,), generator=generator, dtype=torch.int64, device="cpu")


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _sprinkle(target: Tensor, numbers: tuple[float, ...], share: float, generator: torch.Generator) -> None:
    """Replaces about this share of the elements by numbers drawn from `numbers`."""
    chosen = torch.rand(target.shape, generator=generator, dtype=torch.float32, device="cpu") < share
    pick = _below(len(numbers), int(chosen.sum()), generator)
    target[chosen] = torch.tensor(numbers, dtype=target.dtype, device="cpu")[pick]
