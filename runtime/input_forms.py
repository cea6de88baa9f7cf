"""The forms in which people have ids besides flat values with borders, each turned into flat, feature-major tensors.

Shapes and types are looked at, not numbers, except that lengths of a feature in a mapping are added up (which waits
for a GPU): a wrong sum would move ids into the next feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Parts(NamedTuple):
    """What a call carries, before it is checked."""

    values: Any
    offsets: Any
    weights: Any
    lengths: Any
    rows_per_feature: tuple[int, ...] | None = None


def from_dense(values: Tensor, weights: Any, features: int) -> Parts:
    """`[B, F]` (one id per feature) or `[B, F, L]` (L ids per bag, those of the padding id included)."""
    if values.dim() > 3 or values.shape[1] != features:
        raise ValueError(
            f"values: shape {tuple(values.shape)} is not allowed for {features} features; allowed: 1-D with offsets or "
            f"lengths, [batch, features] = [B, {features}] with one id per feature, or [batch, features, ids] = "
            f"[B, {features}, L]"
        )
    batch, per_bag = values.shape[0], 1 if values.dim() == 2 else values.shape[2]
    borders = torch.arange(features * batch + 1, device=values.device, dtype=torch.int64) * per_bag
    if isinstance(weights, Tensor) and weights.dim() > 1:
        if weights.shape != values.shape:
            raise ValueError(f"weights: shape {tuple(weights.shape)} is not that of values, {tuple(values.shape)}")
        weights = weights.transpose(0, 1).reshape(-1)
    return Parts(values.transpose(0, 1).reshape(-1), borders, weights, None, (batch * per_bag,) * features)


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


def from_mapping(given: Mapping[str, Any], names: Sequence[str], device: torch.device) -> Parts:
    """A mapping of feature to its ids, in the order of `names`; keys that are no feature are left alone."""
    missing = [name for name in names if name not in given]
    if missing:
        keys = ", ".join(map(str, given))
        raise ValueError(f"values: no key for feature {', '.join(map(repr, missing))}; its keys: {keys}")
    parts = [_feature(name, given[name], device) for name in names]
    sizes = [part.lengths.numel() for part in parts]
    if len(set(sizes)) > 1:
        told = ", ".join(f"{name!r} has {size}" for name, size in zip(names, sizes, strict=True))
        raise ValueError(f"values: features differ in their number of samples ({told}); give every one the same")
    weights = None
    if any(part.weights is not None for part in parts):
        weights = torch.cat(
            [
                torch.ones_like(p.values, dtype=torch.float32) if p.weights is None else p.weights.reshape(-1)
                for p in parts
            ]
        )
    rows = tuple(part.values.numel() for part in parts) if all(p.rows_per_feature is not None for p in parts) else None
    return Parts(torch.cat([p.values for p in parts]), None, weights, torch.cat([p.lengths for p in parts]), rows)


def _feature(name: str, given: Any, device: torch.device) -> Parts:
    """One feature's `values[N]` and `lengths[B]`."""
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in ("values", "lengths", "offsets", "weights")]
        if unknown or "values" not in given or ("lengths" in given) == ("offsets" in given):
            raise ValueError(
                f"feature {name!r}: got the keys {', '.join(map(str, given))}; allowed: values, exactly one of lengths "
                "and offsets, and maybe weights"
            )
        values, lengths, offsets, weights = (given.get(k) for k in ("values", "lengths", "offsets", "weights"))
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor):
        (values, lengths), offsets, weights = given, None, None
    elif isinstance(given, Tensor) and given.is_nested:
        nested: Any = given
        values, lengths, offsets, weights = nested.values(), None, nested.offsets(), None
    elif isinstance(getattr(given, "values", None), Tensor):  # a Jagged of this one feature
        values, lengths, offsets, weights = given.values, given.lengths, given.offsets, given.weights
    elif isinstance(given, Tensor):
        return _fixed(name, given)
    elif isinstance(given, list):
        return _from_list(name, given, device)
    else:
        raise TypeError(
            f"feature {name!r}: got {type(given).__name__}; allowed: a tensor [B] or [B, L], a tuple "
            "(values, lengths), a mapping with values and offsets, embforge.Jagged, a nested tensor, or "
            "a list of one list per sample"
        )
    return _jagged(name, values, lengths, offsets, weights)


def _fixed(name: str, ids: Tensor) -> Parts:
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"feature {name!r}: shape {tuple(ids.shape)} is not allowed; allowed: [batch] with one id per sample, or "
            "[batch, ids]"
        )
    per_bag = 1 if ids.dim() == 1 else ids.shape[1]
    lengths = torch.full((ids.shape[0],), per_bag, dtype=torch.int64, device=ids.device)
    return Parts(ids.reshape(-1), None, None, lengths, (ids.numel(),))


def _from_list(name: str, samples: list[Any], device: torch.device) -> Parts:
    bags = [[bag] if isinstance(bag, int) else list(bag) for bag in samples]
    ids = [number for bag in bags for number in bag]
    if not all(isinstance(number, int) for number in ids):
        raise TypeError(f"feature {name!r}: a list holds something else than whole numbers; give one list per sample")
    values = torch.tensor(ids, dtype=torch.int64, device=device)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=device)
    return Parts(values, None, None, lengths, (len(ids),))


def _jagged(name: str, values: Any, lengths: Any, offsets: Any, weights: Any) -> Parts:
    borders, kind = (offsets, "offsets") if lengths is None else (lengths, "lengths")
    if not isinstance(values, Tensor) or not isinstance(borders, Tensor) or borders.dim() != 1:
        raise TypeError(f"feature {name!r}: values and {kind} must be tensors, {kind} with one dimension")
    lengths = borders.diff() if lengths is None else borders
    if values.dim() == 2:  # padded, with lengths that say how many ids of each row count
        if kind == "offsets" or lengths.numel() != values.shape[0]:
            raise ValueError(
                f"feature {name!r}: {kind} of {borders.numel()} for values {tuple(values.shape)}; padded values "
                f"[batch, ids] need lengths [{values.shape[0]}]"
            )
        counts = torch.arange(values.shape[1], dtype=torch.int64, device=values.device) < lengths[:, None]
        weights = weights[counts] if isinstance(weights, Tensor) and weights.dim() == 2 else weights
        values = values[counts]
    elif values.dim() != 1:
        raise ValueError(f"feature {name!r}: values of shape {tuple(values.shape)}; allowed: [ids] or [batch, ids]")
    elif not torch.compiler.is_compiling() and not values.is_meta and not lengths.is_meta:
        total = int(lengths.sum())
        if total != values.numel() or (kind == "offsets" and offsets.numel() and int(offsets[0]) != 0):
            raise ValueError(
                f"feature {name!r}: values has {values.numel()} ids, {kind} cover {total}; both must agree"
            )
    return Parts(values, None, weights, lengths, (values.numel(),))


def padded_to_jagged(padded: Tensor, lengths: Tensor) -> Tensor:
    """The ids that count of `[F, B, L]` with lengths `[F, B]`, feature-major."""
    return padded[torch.arange(padded.shape[-1], dtype=torch.int64, device=padded.device) < lengths[..., None]]


def offsets_of(lengths: Tensor) -> Tensor:
    """Borders of bags, from their lengths."""
    return pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
