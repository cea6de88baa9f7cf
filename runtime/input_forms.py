"""The forms in which people have ids besides flat values with borders, each turned into flat, feature-major tensors.

Shapes and types are looked at, not numbers, except that lengths of padded ids and of a feature in a mapping are looked
at where they are on the host or must be: a wrong sum would move ids into the next feature.
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


class Parts(NamedTuple):
    """What a call carries, before it is checked."""

    values: Any
    offsets: Any
    weights: Any
    lengths: Any
    rows_per_feature: tuple[int, ...] | None = None


def as_tensor(given: Any) -> Any:
    """A numpy array as the tensor that shares its memory (a copy, if it may not be written to); all else as it is."""
    if not isinstance(given, np.ndarray):
        return given
    return torch.from_numpy(given if given.flags.writeable else given.copy())


def offsets_of(lengths: Tensor) -> Tensor:
    """Borders of bags, from their lengths."""
    return pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


# ---- All features in one tensor or list --------------------------------------------------------------------


def from_dense(values: Tensor, weights: Any, features: int) -> Parts:
    """`[B, F]` (one id per feature) or `[B, F, L]` (L ids per bag, those of the padding id included)."""
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
                f"weights: shape {tuple(weights.shape)} is not that of values, {tuple(values.shape)}; give one weight "
                "per id, in the order [batch, features] or [batch, features, ids]"
            )
        weights = weights.transpose(0, 1).reshape(-1)
    return Parts(values.transpose(0, 1).reshape(-1), borders, weights, None, (batch * per_bag,) * features)


def from_dense_with_lengths(values: Tensor, weights: Any, lengths: Any, features: int) -> Parts:
    """`[B, F, L]` of which the first `lengths[f, b]` ids of a bag count."""
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
    return Parts(parts.values.view(shape)[counted], None, weights, lengths)


def from_padded(ids: Any, lengths: Any, weights: Any, padding: int | None) -> tuple[Parts, int]:
    """`[B, F, L]` or `[B, F]` without the ids that only pad, and the number of features."""
    ids, lengths, weights = map(as_tensor, (ids, lengths, weights))
    if not isinstance(ids, Tensor) or ids.dim() not in (2, 3):
        given = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids: {given}; allowed: a tensor [batch, features, ids] or [batch, features]")
    features = ids.shape[1]
    if lengths is not None:
        if padding is not None:
            raise ValueError("lengths, padding: both given; give one of them: either says which ids count")
        return from_dense_with_lengths(ids, weights, lengths, features), features
    parts = from_dense(ids, weights, features)
    if padding is None:
        return parts, features
    counted = parts.values != padding
    lengths = counted.view(features, ids.shape[0], -1 if ids.numel() else 0).sum(2)
    weights = parts.weights[counted] if isinstance(parts.weights, Tensor) else None
    return Parts(parts.values[counted], None, weights, lengths), features


def from_lists(
    samples: Sequence[Sequence[Any]],
    weights: Sequence[Sequence[Any]] | None,
    features: int | None,
    device: torch.device,
) -> tuple[Parts, int]:
    """`samples[b][f]`, each a list of ids or one id; and the number of features."""
    if features is None:
        if not samples:
            raise ValueError("samples: there is none, so the number of features is not known; give num_features=")
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
        given = [_floats(weights[b][f]) for f in range(features) for b in range(len(samples))]
        if [len(bag) for bag in given] != [len(bag) for bag in bags]:
            raise ValueError("weights: not one per id; allowed: the form of samples, weights[b][f]")
        factors = torch.tensor([x for bag in given for x in bag], dtype=torch.float32, device=device)
    values = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=device)
    by_feature = [bags[f * len(samples) : (f + 1) * len(samples)] for f in range(features)]
    rows = tuple(sum(map(len, own)) for own in by_feature)
    return Parts(values, None, factors, lengths, rows), features


def flat_lengths(lengths: Any, features: int) -> Any:
    """Lengths `[F, B]` as `[F*B]`; 1-D ones are feature-major already. No other order is guessed."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 2:
        return lengths
    if lengths.shape[0] != features:
        hint = "; it looks like [batch, features]: give lengths.t()" if lengths.shape[1] == features else ""
        raise ValueError(
            f"lengths: shape {tuple(lengths.shape)} is not allowed; allowed: [features, batch] = [{features}, B], "
            f"or flat in that order{hint}"
        )
    return lengths.reshape(-1)


def _counted(lengths: Tensor, most: int) -> Tensor:
    """Which of `most` places per bag hold one of its first `lengths` ids."""
    if lengths.is_cpu and not torch.compiler.is_compiling() and lengths.numel():
        low, high = (int(end) for end in lengths.aminmax())
        if low < 0 or high > most:
            raise ValueError(f"lengths: from {low} to {high}, for values with {most} ids per bag; allowed: 0 to {most}")
    return torch.arange(most, dtype=torch.int64, device=lengths.device) < lengths[..., None]


# ---- A mapping of feature to its ids -----------------------------------------------------------------------


def from_mapping(given: Mapping[str, Any], names: Sequence[str], device: torch.device, weights: Any = None) -> Parts:
    """A mapping of feature to its ids, in the order of `names`; keys that are no feature are left alone.

    `weights`: a mapping of feature to weights in the form of its ids, which may leave features out, or None.
    """
    missing = [name for name in names if name not in given]
    if missing:
        keys = ", ".join(map(str, given))
        raise ValueError(f"values: no key for feature {', '.join(map(repr, missing))}; its keys: {keys}")
    unknown = [name for name in weights or () if name not in names]
    if unknown:
        raise ValueError(f"weights: {unknown[0]!r} is no feature; allowed: {', '.join(names)}")
    parts = [_feature(name, given[name], device, (weights or {}).get(name)) for name in names]
    sizes = [part.lengths.numel() for part in parts]
    if len(set(sizes)) > 1:
        told = ", ".join(f"{name!r} has {size}" for name, size in zip(names, sizes, strict=True))
        raise ValueError(f"values: features differ in their number of samples ({told}); give every one the same")
    devices = [part.values.device for part in parts]
    if len(set(devices)) > 1:
        told = ", ".join(f"{name!r} is on {place}" for name, place in zip(names, devices, strict=True))
        raise ValueError(f"values: features are on several devices ({told}); move all to one with .to()")
    factors = None
    if any(part.weights is not None for part in parts):
        ones = [torch.ones_like(p.values, dtype=torch.float32) if p.weights is None else p.weights for p in parts]
        factors = torch.cat(ones)
    rows = tuple(part.values.numel() for part in parts)
    return Parts(torch.cat([p.values for p in parts]), None, factors, torch.cat([p.lengths for p in parts]), rows)


def _feature(name: str, given: Any, device: torch.device, weights: Any) -> Parts:
    """One feature's `values[N]`, `lengths[B]` and maybe `weights[N]`."""
    given, lengths, offsets, own = _unpacked(name, as_tensor(given))
    if weights is not None and own is not None:
        raise ValueError(f"feature {name!r}: has weights in values and in weights; leave one out")
    weights = as_tensor(own if weights is None else weights)
    given, lengths, offsets = map(as_tensor, (given, lengths, offsets))
    if isinstance(weights, Tensor) and weights.is_nested:
        weights = weights.values()
    if isinstance(given, list):
        if lengths is not None or offsets is not None:
            raise TypeError(f"feature {name!r}: values is a list beside lengths or offsets; allowed there: a tensor")
        parts = _from_list(name, given, device)
    elif not isinstance(given, Tensor):
        raise TypeError(
            f"feature {name!r}: got {type(given).__name__}; allowed: a tensor [B] or [B, L], a tuple "
            "(values, lengths), a mapping with values and offsets, embforge.Jagged, a nested tensor, or "
            "a list of one list per sample"
        )
    elif lengths is None and offsets is None:
        parts = _fixed(name, given)
    else:
        return _jagged(name, given, lengths, offsets, weights)
    return parts._replace(weights=_flat_weights(name, weights, parts.values, given))


def _unpacked(name: str, given: Any) -> tuple[Any, Any, Any, Any]:
    """Ids, lengths, offsets and weights of a feature, whatever carries them."""
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in FEATURE_KEYS]
        if unknown or "values" not in given or ("lengths" in given and "offsets" in given):
            raise ValueError(
                f"feature {name!r}: got the keys {', '.join(map(str, given))}; allowed: values, at most one of lengths "
                "and offsets, and maybe weights"
            )
        values, lengths, offsets, weights = (given.get(key) for key in FEATURE_KEYS)
        return values, lengths, offsets, weights
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(f"feature {name!r}: a tuple of {len(given)}; allowed: (values, lengths)")
        return given[0], given[1], None, None
    if isinstance(given, Tensor):
        if not given.is_nested:
            return given, None, None, None
        nested: Any = given
        if nested.lengths() is not None:
            nested = given.contiguous()
        return nested.values(), None, nested.offsets(), None
    if isinstance(getattr(given, "values", None), Tensor):  # a Jagged of this one feature
        if given.num_features not in (None, 1):
            raise ValueError(f"feature {name!r}: a Jagged of {given.num_features} features; allowed here: of one")
        lengths = None if given.lengths is None else given.lengths.reshape(-1)
        return given.values, lengths, given.offsets, given.weights
    return given, None, None, None


def _fixed(name: str, ids: Tensor) -> Parts:
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"feature {name!r}: shape {tuple(ids.shape)} is not allowed; allowed: [batch] with one id per sample, or "
            "[batch, ids]"
        )
    per_bag = 1 if ids.dim() == 1 else ids.shape[1]
    lengths = torch.full((ids.shape[0],), per_bag, dtype=torch.int64, device=ids.device)
    return Parts(ids.reshape(-1), None, None, lengths)


def _from_list(name: str, samples: list[Any], device: torch.device) -> Parts:
    bags = [_ids(f"feature {name!r}, sample {number}", bag) for number, bag in enumerate(samples)]
    values = torch.tensor([number for bag in bags for number in bag], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=device)
    return Parts(values, None, None, lengths)


def _jagged(name: str, values: Tensor, lengths: Any, offsets: Any, weights: Any) -> Parts:
    borders, kind = (offsets, "offsets") if lengths is None else (lengths, "lengths")
    if not isinstance(borders, Tensor) or borders.dim() != 1:
        raise TypeError(f"feature {name!r}: {kind} must be a tensor with one dimension, [batch] lengths or [batch + 1]")
    lengths = borders.diff() if lengths is None else borders
    if values.dim() == 2:  # padded, with lengths that say how many ids of each row count
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
            hint = "; are they offsets? give {'values': ..., 'offsets': ...}" if kind == "lengths" else ""
            raise ValueError(
                f"feature {name!r}: values has {values.numel()} ids, {kind} cover {total}; both must agree{hint}"
            )
    return Parts(values, None, _flat_weights(name, weights, values, values), lengths)


def _flat_weights(name: str, weights: Any, values: Tensor, given: Any) -> Tensor | None:
    """One weight per id of a feature: what is too much here would belong to the next feature."""
    if weights is None:
        return None
    if isinstance(weights, list):
        flat = [number for bag in weights for number in _floats(bag)]
        weights = torch.tensor(flat, dtype=torch.float32, device=values.device)
    if not isinstance(weights, Tensor):
        raise TypeError(f"feature {name!r}: weights is a {type(weights).__name__}; allowed: what its ids are")
    same = not isinstance(given, Tensor) or weights.dim() == 1 or weights.shape == given.shape
    if weights.numel() != values.numel() or not same:
        raise ValueError(_wrong_weights(name, weights, given if isinstance(given, Tensor) else values))
    return weights.reshape(-1)


def _wrong_weights(name: str, weights: Tensor, values: Tensor) -> str:
    return (
        f"feature {name!r}: weights of shape {tuple(weights.shape)} for ids of shape {tuple(values.shape)}; give one "
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
    """A tensor or an array without dimensions says that it is iterable, and is not."""
    return getattr(bag, "ndim", 1) > 0
