"""A second definition of what a lookup means: loops over numpy float32 numbers that share no code with the package.

Slow and obvious. The reference backend is held against it, and everything else against the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec, FeatureSpec

Row = np.ndarray
STAYS = {"max": np.greater_equal, "min": np.less_equal}
"""For each selection: whether a number stays before a later one."""
DIVIDED = {"sum": False, "mean": True, "sqrtn": True}
"""For each sum: whether it is divided."""


def lookup(
    spec: CollectionSpec, values: Tensor, offsets: Tensor, weights: Tensor | None, tables: Sequence[Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Pooled `[B, columns]` and flat sequence as bits of the output dtype. Ids outside a table are absent."""
    ids, borders = values.tolist(), offsets.tolist()
    samples = (len(borders) - 1) // len(spec.features)
    names = [t.name for t in spec.tables]
    columns: list[list[Row]] = [[] for _ in range(samples)]
    sequence: list[Row] = []
    for f, feature in enumerate(spec.features):
        rows = decode(tables[names.index(feature.table)])
        for b in range(samples):
            start, stop = borders[f * samples + b], borders[f * samples + b + 1]
            bag_weights = [np.float32(1)] * (stop - start)
            if weights is not None and feature.weighted:
                bag_weights = [np.float32(w) for w in weights[start:stop].tolist()]
            result = _bag(feature, rows, ids[start:stop], bag_weights)
            (sequence if feature.pooling == "none" else columns[b]).append(result)
    width = sum(_width(spec, feature) for feature in spec.features)
    pooled = np.array([np.concatenate(c) for c in columns if c], dtype=np.float32).reshape(samples, width)
    flat = np.concatenate([np.zeros(0, dtype=np.float32), *(s.reshape(-1) for s in sequence)])
    return encode(pooled, spec.output_dtype), encode(flat, spec.output_dtype)


def _width(spec: CollectionSpec, feature: FeatureSpec) -> int:
    if feature.pooling == "none":
        return 0
    return spec.table(feature.table).embedding_dim * (feature.hotness if feature.pooling == "concat" else 1)


def _bag(feature: FeatureSpec, rows: np.ndarray, ids: list[int], weights: list[np.float32]) -> Row:
    zero = np.zeros(rows.shape[1], dtype=np.float32)
    if feature.pooling in ("none", "concat"):
        scaled = [rows[i] * w if 0 <= i < len(rows) else zero for i, w in zip(ids, weights, strict=True)]
        fill = feature.hotness - len(ids) if feature.pooling == "concat" else 0
        return np.concatenate([zero[:0], *scaled, *[zero] * fill])
    # An absent id (None) keeps its place in its chunk and adds nothing.
    kept = [0 <= i < len(rows) and i != feature.padding_idx for i in ids]
    if not any(kept):
        return zero
    if feature.pooling in STAYS:
        best, *later = [rows[i] for i, keep in zip(ids, kept, strict=True) if keep]
        for row in later:
            best = np.where(STAYS[feature.pooling](best, row) | np.isnan(best), best, row)
        return best
    if feature.pooling not in DIVIDED:
        raise ValueError(f"what pooling {feature.pooling!r} means is not said here yet")
    items = [rows[i] * w if keep else None for i, w, keep in zip(ids, weights, kept, strict=True)]
    total = _sum(items, zero)
    present = [w if keep else None for w, keep in zip(weights, kept, strict=True)]
    if not DIVIDED[feature.pooling]:
        return total
    one = np.zeros((), dtype=np.float32)
    if feature.weighted:
        squared = [None if w is None else w * w for w in present]
        denominator = _sum(present, one) if feature.pooling == "mean" else np.sqrt(_sum(squared, one))
    else:
        count = np.float32(sum(kept))
        denominator = count if feature.pooling == "mean" else np.sqrt(count)
    return zero if denominator == 0 else total / denominator


def _sum(items: list, zero: np.ndarray) -> np.ndarray:
    """Chunks of 64 in order from zero; the chunks' sums by the same rule."""
    if len(items) > 64:
        return _sum([_sum(items[i : i + 64], zero) for i in range(0, len(items), 64)], zero)
    total = zero
    for item in items:
        if item is not None:
            total = total + item
    return total


def decode(table: Tensor) -> np.ndarray:
    """The rows as float32, from their bits."""
    table = table.contiguous()
    if table.dtype == torch.bfloat16:
        bits = table.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    if table.dtype == torch.float8_e4m3fn:
        return _FP8[table.view(torch.uint8).numpy()]
    if table.dtype == torch.float8_e5m2:  # the upper half of fp16
        return (table.view(torch.uint8).numpy().astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    return table.numpy().astype(np.float32)


def _fp8_e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_FP8 = np.array([_fp8_e4m3(byte) for byte in range(256)], dtype=np.float32)


def encode(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Bits of the output dtype, rounded to nearest even, every NaN the same."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    if dtype == "fp32":
        bits, nan = numbers.view(np.uint32), np.uint32(0x7FC00000)
    elif dtype == "fp16":
        with np.errstate(over="ignore"):
            bits, nan = numbers.astype(np.float16).view(np.uint16), np.uint16(0x7E00)
    else:
        wide = numbers.view(np.uint32).astype(np.uint64)
        bits, nan = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16), np.uint16(0x7FC0)
    return np.where(np.isnan(numbers), nan, bits)


def bits_of(tensor: Tensor) -> np.ndarray:
    """A result's bits in the form that `encode` gives."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    return encode(tensor.float().numpy(), names[tensor.dtype])
