"""Turns the forms of input other than flat values with borders into flat, feature-major tensors.

Only shapes and types are checked, not numbers, with one exception: lengths of padded ids, and of a feature in a
mapping, are checked if they are on the host or must be, because a wrong sum would move ids into the next feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

FEATURE_KEYS = ("values", "lengths", "offsets", "weights")


class RawInput(NamedTuple):
    """The input of a call, before it is checked."""

    values: Any
    offsets: Any
    weights: Any
    lengths: Any
    rows_per_feature: tuple[int, ...] | None = None


def as_tensor(value: Any) -> Any:
    """A numpy array as a tensor that shares its memory, or as a copy if it is read-only; other values unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def offsets_of(lengths: Tensor) -> Tensor:
    """The borders of bags, computed from their lengths."""
    return pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


# ---- All features in one tensor or list --------------------------------------------------------------------


def from_dense(values: Tensor, weights: Any, features: int) -> RawInput:
    """The input of ids `[B, F]` (one id per feature) or `[B, F, L]` (L ids per bag, including padding ids)."""
    if values.dim() not in (2, 3) or values.shape[1] != features:
        raise ValueError(
            f"values: shape {tuple(values.shape)} is not allowed for {features} features; allowed: 1-D with offsets or "
            f"lengths, [batch, features] = [B, {features}] with one id per feature, or [batch, features, ids] = "
            f"[B, {features}, L]"
        )
    batch, per_bag = values.shape[0], 1 if values.dim() == 2 else values.shape[2]
    borders = torch.arange(features * batch + 1, device=values.device, dtype=torch.int64) * per_bag
    if isinstance(weights, Tensor) and weights.dim() > 1:
        if weights.shape != values.shape:
            raise ValueError(
                f"weights: shape {tuple(weights.shape)} is not that of values, {tuple(values.shape)}; pass one weight "
                "per id, in the order [batch, features] or [batch, features, ids]"
            )
        weights = weights.transpose(0, 1).reshape(-1)
    return RawInput(values.transpose(0, 1).reshape(-1), borders, weights, None, (batch * per_bag,) * features)


def from_dense_with_lengths(values: Tensor, weights: Any, lengths: Any, features: int) -> RawInput:
    """The input of ids `[B, F, L]`, of which a bag has only the first `lengths[f, b]` ids."""
    parts = from_dense(values, weights, features)
    lengths = flat_lengths(lengths, features)
    if values.dim() != 3 or not isinstance(lengths, Tensor) or lengths.numel() != features * values.shape[0]:
        raise ValueError(
            f"lengths: do not fit values of shape {tuple(values.shape)}; padded values [batch, features, ids] take "
            f"lengths [features, batch] = [{features}, {values.shape[0]}]"
        )
    shape = (features, values.shape[0], values.shape[2])
    counted = _counted(lengths.reshape(shape[:2]), shape[2])
    if isinstance(parts.weights, Tensor):
        weights = parts.weights.view(shape)[counted]
    return RawInput(parts.values.view(shape)[counted], None, weights, lengths)


def from_padded(ids: Any, lengths: Any, weights: Any, padding: int | None) -> tuple[RawInput, int]:
    """The input of ids `[B, F, L]` or `[B, F]` without those that only fill bags up, and the number of features."""
    ids, lengths, weights = map(as_tensor, (ids, lengths, weights))
    if not isinstance(ids, Tensor) or ids.dim() not in (2, 3):
        got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids: {got}; allowed: a tensor [batch, features, ids] or [batch, features]")
    features = ids.shape[1]
    if lengths is not None:
        if padding is not None:
            raise ValueError(
                "lengths, padding: both were passed; pass one of them, because either says which ids count"
            )
        return from_dense_with_lengths(ids, weights, lengths, features), features
    parts = from_dense(ids, weights, features)
    if padding is None:
        return parts, features
    counted = parts.values != padding
    lengths = counted.view(features, ids.shape[0], -1 if ids.numel() else 0).sum(2)
    weights = parts.weights[counted] if isinstance(parts.weights, Tensor) else None
    return RawInput(parts.values[counted], None, weights, lengths), features


def from_lists(
    samples: Sequence[Sequence[Any]],
    weights: Sequence[Sequence[Any]] | None,
    features: int | None,
    device: torch.device,
) -> tuple[RawInput, int]:
    """The input of `samples[b][f]`, each of which is a list of ids or one id, and the number of features."""
    if features is None:
        if not samples:
            raise ValueError("samples: the list is empty, so the number of features is not known; pass num_features=")
        features = len(samples[0])
    for number, sample in enumerate(samples):
        if len(sample) != features:
            raise ValueError(
                f"samples: sample {number} has {len(sample)} entries for {features} features; allowed: one list per "
                "sample that holds one list of ids per feature, samples[b][f]"
            )
    bags = [_ids(f"sample {b}, feature {f}", samples[b][f]) for f in range(features) for b in range(len(samples))]
    factors = None
    if weights is not None:
        by_bag = [_floats(weights[b][f]) for f in range(features) for b in range(len(samples))]
        if [len(bag) for bag in by_bag] != [len(bag) for bag in bags]:
            raise ValueError("weights: not one per id; allowed: the form of samples, weights[b][f]")
        factors = torch.tensor([x for bag in by_bag for x in bag], dtype=torch.float32, device=device)
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=device)
    by_feature = [bags[f * len(samples) : (f + 1) * len(samples)] for f in range(features)]
    rows = tuple(sum(map(len, feature_bags)) for feature_bags in by_feature)
    return RawInput(values, None, factors, lengths, rows), features


def flat_lengths(lengths: Any, features: int) -> Any:
    """Lengths `[F, B]` as `[F*B]`; 1-D lengths, which must be feature-major, unchanged. ValueError for other shapes."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 2:
        return lengths
    if lengths.shape[0] != features:
        hint = "; it looks like [batch, features]: pass lengths.t()" if lengths.shape[1] == features else ""
        raise ValueError(
            f"lengths: shape {tuple(lengths.shape)} is not allowed; allowed: [features, batch] = [{features}, B], "
            f"or flat in that order{hint}"
        )
    return lengths.reshape(-1)


def _counted(lengths: Tensor, most: int) -> Tensor:
    """For each of `most` positions per bag, whether it is among the first `lengths` ones."""
    if lengths.is_cpu and not torch.compiler.is_compiling() and lengths.numel():
        low, high = (int(end) for end in lengths.aminmax())
        if low < 0 or high > most:
            raise ValueError(f"lengths: from {low} to {high}, for values with {most} ids per bag; allowed: 0 to {most}")
    return torch.arange(most, dtype=torch.int64, device=lengths.device) < lengths[..., None]


# ---- A mapping of feature to its ids -----------------------------------------------------------------------


def from_mapping(ids: Mapping[str, Any], names: Sequence[str], device: torch.device, weights: Any = None) -> RawInput:
    """The input of a mapping from features to their ids, in the order of `names`. Keys that are not features are
    ignored.

    `weights`: a mapping from features to weights in the form of their ids, which does not have to have all features; or
    None.
    """
    missing = [name for name in names if name not in ids]
    if missing:
        keys = ", ".join(map(str, ids))
        raise ValueError(f"values: no key for feature {', '.join(map(repr, missing))}; its keys: {keys}")
    unknown = [name for name in weights or () if name not in names]
    if unknown:
        raise ValueError(f"weights: {unknown[0]!r} is no feature; allowed: {', '.join(names)}")
    parts = [_feature(name, ids[name], device, (weights or {}).get(name)) for name in names]
    sizes = [part.lengths.numel() for part in parts]
    if len(set(sizes)) > 1:
        listed = ", ".join(f"{name!r} has {size}" for name, size in zip(names, sizes, strict=True))
        raise ValueError(f"values: features differ in their number of samples ({listed}); all must have the same")
    devices = [part.values.device for part in parts]
    if len(set(devices)) > 1:
        listed = ", ".join(f"{name!r} is on {each}" for name, each in zip(names, devices, strict=True))
        raise ValueError(f"values: features are on several devices ({listed}); move all to one with .to()")
    factors = None
    if any(part.weights is not None for part in parts):
        ones = [torch.ones_like(p.values, dtype=torch.float32) if p.weights is None else p.weights for p in parts]
        factors = torch.cat(ones)
    rows = tuple(part.values.numel() for part in parts)
    return RawInput(torch.cat([p.values for p in parts]), None, factors, torch.cat([p.lengths for p in parts]), rows)


class _FeatureInput(NamedTuple):
    """The input of one feature, before it is checked."""

    values: Any
    lengths: Any = None
    offsets: Any = None
    weights: Any = None


def _feature(name: str, value: Any, device: torch.device, weights: Any) -> RawInput:
    """One feature's `values[N]`, `lengths[B]` and, if it has weights, `weights[N]`."""
    ids, lengths, offsets, own_weights = map(as_tensor, _unpacked(name, as_tensor(value)))
    if weights is not None and own_weights is not None:
        raise ValueError(f"feature {name!r}: has weights in values and in weights; leave one out")
    weights = own_weights if weights is None else as_tensor(weights)
    if isinstance(weights, Tensor) and weights.is_nested:
        weights = weights.values()
    if isinstance(ids, list):
        if lengths is not None or offsets is not None:
            raise TypeError(f"feature {name!r}: values is a list; with lengths or offsets it must be a tensor")
        parts = _from_list(name, ids, device)
    elif not isinstance(ids, Tensor):
        raise TypeError(
            f"feature {name!r}: got {type(ids).__name__}; allowed: a tensor [B] or [B, L], a tuple "
            "(values, lengths), a mapping with values and offsets, embforge.Jagged, a nested tensor, or "
            "a list of one list per sample"
        )
    elif lengths is None and offsets is None:
        parts = _fixed(name, ids)
    else:
        return _jagged(name, ids, lengths, offsets, weights)
    return parts._replace(weights=_flat_weights(name, weights, parts.values, ids))


def _unpacked(name: str, value: Any) -> _FeatureInput:
    """The ids, lengths, offsets and weights in an object with one feature's input."""
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in FEATURE_KEYS]
        if unknown or "values" not in value or ("lengths" in value and "offsets" in value):
            raise ValueError(
                f"feature {name!r}: got the keys {', '.join(map(str, value))}; allowed: values, at most one of lengths "
                "and offsets, and weights if the feature is weighted"
            )
        return _FeatureInput(*(value.get(key) for key in FEATURE_KEYS))
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"feature {name!r}: a tuple of {len(value)}; allowed: (values, lengths)")
        return _FeatureInput(*value)
    if isinstance(value, Tensor):
        if not value.is_nested:
            return _FeatureInput(value)
        nested: Any = value
        if nested.lengths() is not None:
            nested = value.contiguous()
        return _FeatureInput(nested.values(), offsets=nested.offsets())
    if isinstance(getattr(value, "values", None), Tensor):  # a Jagged of this one feature
        if value.num_features not in (None, 1):
            raise ValueError(f"feature {name!r}: a Jagged of {value.num_features} features; allowed here: of one")
        lengths = None if value.lengths is None else value.lengths.reshape(-1)
        return _FeatureInput(value.values, lengths, value.offsets, value.weights)
    return _FeatureInput(value)


def _fixed(name: str, ids: Tensor) -> RawInput:
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"feature {name!r}: shape {tuple(ids.shape)} is not allowed; allowed: [batch] with one id per sample, or "
            "[batch, ids]"
        )
    per_bag = 1 if ids.dim() == 1 else ids.shape[1]
    lengths = torch.full((ids.shape[0],), per_bag, dtype=torch.int64, device=ids.device)
    return RawInput(ids.reshape(-1), None, None, lengths)


def _from_list(name: str, samples: list[Any], device: torch.device) -> RawInput:
    bags = [_ids(f"feature {name!r}, sample {number}", bag) for number, bag in enumerate(samples)]
    values = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=device)
    return RawInput(values, None, None, lengths)


def _jagged(name: str, values: Tensor, lengths: Any, offsets: Any, weights: Any) -> RawInput:
    borders, kind = (offsets, "offsets") if lengths is None else (lengths, "lengths")
    if not isinstance(borders, Tensor) or borders.dim() != 1:
        raise TypeError(f"feature {name!r}: {kind} must be a tensor with one dimension, [batch] lengths or [batch + 1]")
    lengths = borders.diff() if lengths is None else borders
    if values.dim() == 2:  # padded, with lengths that say how many ids each bag has
        if kind == "offsets" or lengths.numel() != values.shape[0]:
            raise ValueError(
                f"feature {name!r}: {kind} of {borders.numel()} for values {tuple(values.shape)}; padded values "
                f"[batch, ids] need lengths [{values.shape[0]}]"
            )
        counted = _counted(lengths, values.shape[1])
        if isinstance(weights, Tensor) and weights.dim() == 2:
            if weights.shape != values.shape:
                raise ValueError(_wrong_weights(name, weights, values))
            weights = weights[counted]
        values = values[counted]
    elif values.dim() != 1:
        raise ValueError(f"feature {name!r}: values of shape {tuple(values.shape)}; allowed: [ids] or [batch, ids]")
    elif not torch.compiler.is_compiling() and not values.is_meta and not lengths.is_meta:
        total = int(lengths.sum())
        if total != values.numel() or (kind == "offsets" and offsets.numel() and int(offsets[0]) != 0):
            hint = "; if they are offsets, pass {'values': ..., 'offsets': ...}" if kind == "lengths" else ""
            raise ValueError(
                f"feature {name!r}: values has {values.numel()} ids, {kind} cover {total}; both must agree{hint}"
            )
    return RawInput(values, None, _flat_weights(name, weights, values, values), lengths)


def _flat_weights(name: str, weights: Any, values: Tensor, ids: Any) -> Tensor | None:
    """The weights of a feature as one weight per id in `values`; ValueError if they do not fit, because extra weights
    would be used for the next feature. `ids`: the ids before they were made flat."""
    if weights is None:
        return None
    if isinstance(weights, list):
        flat = [number for bag in weights for number in _floats(bag)]
        weights = torch.tensor(flat, dtype=torch.float32, device=values.device)
    if not isinstance(weights, Tensor):
        raise TypeError(f"feature {name!r}: weights is a {type(weights).__name__}; allowed: the type of its ids")
    same = not isinstance(ids, Tensor) or weights.dim() == 1 or weights.shape == ids.shape
    if weights.numel() != values.numel() or not same:
        raise ValueError(_wrong_weights(name, weights, ids if isinstance(ids, Tensor) else values))
    return weights.reshape(-1)


def _wrong_weights(name: str, weights: Tensor, values: Tensor) -> str:
    return (
        f"feature {name!r}: weights of shape {tuple(weights.shape)} for ids of shape {tuple(values.shape)}; pass one "
        "weight per id, in the same order"
    )


def _ids(where: str, bag: Any) -> list[int]:
    """The ids of a bag: an iterable of whole numbers, or a single one."""
    try:
        return [index(number) for number in bag] if isinstance(bag, Iterable) and _is_many(bag) else [index(bag)]
    except TypeError:
        raise TypeError(f"{where}: got {bag!r}; allowed: a list of whole numbers, or one whole number") from None


def _floats(bag: Any) -> list[float]:
    return [float(number) for number in bag] if isinstance(bag, Iterable) and _is_many(bag) else [float(bag)]


def _is_many(bag: Any) -> bool:
    """Whether an iterable can be iterated over: tensors and arrays without dimensions only claim that they can."""
    return getattr(bag, "ndim", 1) > 0
