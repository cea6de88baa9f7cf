"""The input of lookups: the only place where the arguments of a call are checked and brought to one form.

`normalise` checks types, shapes and devices, but no numbers: it runs before every lookup, must not wait for a device,
and is traced by torch.compile. `raise_bad_input` checks the numbers, after a kernel has found something wrong in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from embforge.codegen.remap import bad_id
from embforge.codegen.spec import CollectionSpec
from embforge.input_forms import (
    RawInput,
    as_tensor,
    flat_lengths,
    from_dense,
    from_dense_with_lengths,
    from_mapping,
    offsets_of,
)
from embforge.jagged import Jagged

BoundsCheck = Literal["error", "zero", "unchecked"]
BOUNDS_CHECKS: tuple[str, ...] = get_args(BoundsCheck)

_INT32, _INT64, _FLOAT32 = torch.int32, torch.int64, torch.float32
_INT32_MAX = 2**31 - 1
CPU = torch.device("cpu")
"""The device of host tensors. `normalise` is faster if it gets this object and not an equal one."""


def usual_bounds_check(spec: CollectionSpec, bounds_check: BoundsCheck) -> BoundsCheck:
    """The bounds check that a module uses: the requested one, but "zero" instead of "unchecked" if ids may be absent,
    because kernels recognise absent ids only when they check."""
    return "zero" if bounds_check == "unchecked" and spec.has_absent_ids else bounds_check


class Batch(NamedTuple):
    """The input of a call in its normal form: 1-D contiguous tensors on the tables' device, feature-major."""

    values: Tensor
    """The ids, int32 or int64."""
    offsets: Tensor
    """The borders of bags, in the dtype of `values`."""
    weights: Tensor | None
    """The per-sample weights, float32."""
    batch: int
    """The number of samples."""
    rows_per_feature: tuple[int, ...] | None
    """The number of ids of each feature, if the host knows it."""


_batch = partial(tuple.__new__, Batch)  # the constructor of a named tuple takes twice as long


def normalise(
    spec: CollectionSpec,
    device: torch.device,
    values: Any,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Batch:
    """The batch that the arguments of a call describe. `values` may be a tensor, a mapping from features to ids, a
    `Jagged`, a nested jagged tensor of F*B bags or an object with the interface of TorchRec's KeyedJaggedTensor; see
    docs/inputs.md.

    Raises TypeError (dtype or type of an argument) or ValueError (shape, length or device) that names the argument.
    """
    # The form of nearly every call is recognised by the cheapest checks, which take about 1 µs together.
    if type(values) is Tensor and type(offsets) is Tensor and lengths is None:
        dtype = values.dtype
        if (
            (dtype is _INT64 or dtype is _INT32)
            and offsets.dtype is dtype
            and values.dim() == 1 == offsets.dim()
            and values.is_contiguous()
            and offsets.is_contiguous()
            and (
                (values.is_cpu and offsets.is_cpu)
                if device is CPU or device == CPU
                else values.device == device == offsets.device
            )
            and (weights is None or _fits_as_it_is(weights, values))
        ):
            features, bags = len(spec.features), offsets.numel() - 1
            batch = bags // features
            if batch * features == bags >= 0:
                return _batch((values, offsets, weights, batch, None))
    return _normalise_any(spec, device, _unpack(spec, device, values, offsets, weights, lengths))


def with_negation_applied(batch: Batch) -> Batch:
    """The batch without lazily negated tensors, for kernels that read memory by address.

    torch may negate a tensor lazily (see `Tensor.is_neg`; the imaginary part of a conjugate is an example): its memory
    then holds the numbers with the other sign. In calls of an operator torch's dispatcher does the same.
    """
    values, offsets, weights, size, rows = batch
    if values.is_neg() or offsets.is_neg() or (weights is not None and weights.is_neg()):
        weights = None if weights is None else weights.resolve_neg()
        return Batch(values.resolve_neg(), offsets.resolve_neg(), weights, size, rows)
    return batch


def _fits_as_it_is(weights: Tensor, values: Tensor) -> bool:
    return (
        type(weights) is Tensor
        and weights.dtype is _FLOAT32
        and weights.dim() == 1
        and weights.numel() == values.numel()
        and weights.is_contiguous()
        and (weights.is_cpu if values.is_cpu else weights.device == values.device)
    )


def _normalise_any(spec: CollectionSpec, device: torch.device, parts: RawInput) -> Batch:
    values = _checked("values", parts.values, (_INT32, _INT64), device)
    weights = None if parts.weights is None else _checked("weights", _uncast(parts.weights), (_FLOAT32,), device)
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(f"weights: {weights.numel()} numbers for {values.numel()} ids; pass one weight per id")
    features = len(spec.features)
    if parts.lengths is not None:
        lengths = _checked("lengths", flat_lengths(parts.lengths, features), (_INT32, _INT64), device)
        if lengths.numel() % features:
            raise ValueError(
                f"lengths: length {lengths.numel()} does not fit {features} features; allowed: {features} * batch, "
                "the bags of the first feature first, or [features, batch]"
            )
        offsets = offsets_of(lengths)
    else:
        offsets = _checked("offsets", parts.offsets, (_INT32, _INT64), device)
        _check_offsets_length(offsets, features)
    batch = (offsets.numel() - 1) // features
    if values.dtype is _INT32 and offsets.dtype is _INT64:
        if values.numel() < _INT32_MAX:  # clamped, so that an offset that does not fit into int32 stays wrong
            offsets = offsets.clamp(-_INT32_MAX, _INT32_MAX).to(_INT32)
        else:
            values = values.to(_INT64)
    rows = parts.rows_per_feature
    if rows is not None:
        _check_rows(spec, rows, values, offsets, batch)
    return Batch(values, offsets.to(values.dtype), weights, batch, rows)


def _uncast(weights: Any) -> Any:
    """Weights that a model has computed under torch.autocast, converted to float32, which lookups need there too."""
    narrow = isinstance(weights, Tensor) and weights.dtype in (torch.float16, torch.bfloat16)
    return weights.to(_FLOAT32) if narrow and torch.is_autocast_enabled(weights.device.type) else weights


def _checked(name: str, tensor: Any, dtypes: Sequence[torch.dtype], device: torch.device) -> Tensor:
    allowed = ", ".join(map(str, dtypes))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; allowed: a 1-D tensor of {allowed}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: {allowed}; convert it with .to()")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} is not allowed; allowed: 1-D; use flatten()")
    same = tensor.device.type == device.type and (tensor.is_cpu or device.index in (None, tensor.device.index))
    if not same:
        raise ValueError(
            f"{name}: is on {tensor.device}, the tables are on {device}; move it with .to({str(device)!r})"
        )
    return tensor.contiguous()


def _check_offsets_length(offsets: Tensor, features: int) -> None:
    if offsets.numel() == 0 or (offsets.numel() - 1) % features:
        raise ValueError(
            f"offsets: length {offsets.numel()} does not fit {features} features; allowed: {features} * batch + 1, "
            "the borders of the first feature's bags first"
        )


def _check_rows(spec: CollectionSpec, rows: tuple[int, ...], values: Tensor, offsets: Tensor, batch: int) -> None:
    if len(rows) != len(spec.features) or min(rows) < 0 or sum(rows) != values.numel():
        raise ValueError(
            f"rows_per_feature: {rows} does not fit {len(spec.features)} features with {values.numel()} ids together"
        )
    if values.is_cpu and not torch.compiler.is_compiling():  # reading device memory would wait for the device
        true = tuple(offsets[::batch].diff().tolist()) if batch else (0,) * len(rows)
        if rows != true:
            raise ValueError(f"rows_per_feature: {rows} does not fit the offsets, which say {true}")


def _unpack(
    spec: CollectionSpec, device: torch.device, values: Any, offsets: Any, weights: Any, lengths: Any
) -> RawInput:
    """The tensors of a call, taken out of the object that holds them. ValueError if borders or weights are passed
    twice."""
    values, offsets, weights, lengths = map(as_tensor, (values, offsets, weights, lengths))
    features = len(spec.features)
    if isinstance(values, Tensor) and not values.is_nested:
        if values.dim() > 1 and offsets is None:
            if lengths is None:
                return from_dense(values, weights, features)
            return from_dense_with_lengths(values, weights, lengths, features)
        if (offsets is None) == (lengths is None):
            passed = "neither was" if offsets is None else "both were"
            raise ValueError(f"offsets, lengths: {passed} passed; pass exactly one of them")
        return RawInput(values, offsets, weights, lengths)
    kind = type(values).__name__
    if isinstance(values, Mapping):
        if weights is not None and not isinstance(weights, Mapping):
            raise ValueError(f"weights: passed together with a {kind}; pass a mapping of feature to weights")
        parts, weights = from_mapping(values, [f.name for f in spec.features], device, weights), None
    else:
        parts = _from_object(spec, values)
    if offsets is not None or lengths is not None:
        name = "lengths" if offsets is None else "offsets"
        raise ValueError(f"{name}: passed together with a {kind}, which has its own; leave it out")
    if weights is None:
        return parts
    if parts.weights is not None:
        raise ValueError(f"weights: passed together with a {kind}, which has its own; leave one out")
    if not isinstance(values, Jagged | Tensor):
        raise ValueError(f"weights: passed together with a {kind}; put them into it, so that they follow its keys")
    return parts._replace(weights=_from_nested(weights).values if getattr(weights, "is_nested", False) else weights)


def _from_object(spec: CollectionSpec, values: Any) -> RawInput:
    """The tensors in an object that holds a whole batch."""
    if isinstance(values, Jagged):
        if values.num_features not in (None, len(spec.features)):
            raise ValueError(
                f"values: a Jagged of {values.num_features} features for the {len(spec.features)} features of the spec"
            )
        return RawInput(values.values, values.offsets, values.weights, values.lengths, values.rows_per_feature)
    if isinstance(values, Tensor):
        return _from_nested(values)
    if all(hasattr(values, name) for name in ("keys", "values", "lengths", "weights_or_none")):
        return _from_keyed(spec, values)
    hint = "; see embforge.Jagged.from_lists" if isinstance(values, list | tuple) else ""
    raise TypeError(
        f"values: got {type(values).__name__}; allowed: a tensor or numpy array of ids, a mapping of feature to ids, "
        f"embforge.Jagged, a nested tensor of layout torch.jagged, a KeyedJaggedTensor{hint}"
    )


def _from_nested(tensor: Any) -> RawInput:
    if tensor.layout is not torch.jagged:
        raise TypeError(
            f"values: nested tensor of layout {tensor.layout} is not allowed; allowed: torch.jagged; "
            "make it with torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    if tensor.lengths() is not None:  # bags with gaps between them
        tensor = tensor.contiguous()
    return RawInput(tensor.values(), tensor.offsets(), None, None)


def _from_keyed(spec: CollectionSpec, keyed: Any) -> RawInput:
    keys, wanted = list(keyed.keys()), [f.name for f in spec.features]
    missing = [name for name in wanted if name not in keys]
    if missing:
        raise ValueError(f"values: no key for feature {', '.join(map(repr, missing))}; its keys: {', '.join(keys)}")
    values, lengths, weights = keyed.values(), keyed.lengths(), keyed.weights_or_none()
    if lengths.dim() != 1 or lengths.numel() % len(keys) or len(set(getattr(keyed, "stride_per_key", list)())) > 1:
        raise ValueError(f"lengths: the {len(keys)} keys differ in batch size; every key needs the same batch")
    if keys == wanted:
        return RawInput(values, None, weights, lengths)
    by_key = lengths.view(len(keys), -1)
    sizes = by_key.sum(1).tolist()
    if sum(sizes) != values.numel():
        raise ValueError(f"values has {values.numel()} ids, lengths add up to {sum(sizes)}")
    order = [keys.index(name) for name in wanted]
    value_parts, weight_parts = values.split(sizes), None if weights is None else weights.split(sizes)
    return RawInput(
        torch.cat([value_parts[i] for i in order]),
        None,
        None if weight_parts is None else torch.cat([weight_parts[i] for i in order]),
        by_key[order].flatten(),
        tuple(sizes[i] for i in order),
    )


def raise_bad_input(
    spec: CollectionSpec, values: Tensor, offsets: Tensor, weights: Tensor | None, batch: int, bounds_check: str
) -> None:
    """Raises an error for the first bad number of a batch, and returns if there is none.

    The order of the checks is: offsets (ValueError), `concat` bags that are longer than their hotness (ValueError),
    and, if `bounds_check` is "error", ids outside their table (IndexError), by feature, sample and position.
    """
    _check_offsets_length(offsets, len(spec.features))
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(f"weights: {weights.numel()} numbers for {values.numel()} ids; pass one weight per id")
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets: offsets[0] is {int(offsets[0])}; offsets must start at 0")
    at = _first(offsets[1:] < offsets[:-1])
    if at is not None:
        raise ValueError(
            f"offsets: offsets[{at}] is {int(offsets[at])} and offsets[{at + 1}] is {int(offsets[at + 1])}; "
            "offsets must never fall (no length may be negative)"
        )
    if int(offsets[-1]) != values.numel():
        raise ValueError(
            f"offsets: values has {values.numel()} ids, offsets end at {int(offsets[-1])}; both must agree"
        )
    for index, feature in enumerate(spec.features):
        if feature.slots:
            lengths = offsets[index * batch : (index + 1) * batch + 1].diff()
            at = _first(lengths > feature.slots)
            if at is not None:
                raise ValueError(
                    f"feature {feature.name!r}: the bag of sample {at} has {int(lengths[at])} ids, "
                    f"hotness={feature.slots} allows {feature.slots}; raise hotness or cut the bag"
                )
    if bounds_check == "error":
        for index in range(len(spec.features)):
            _check_ids(spec, index, values, offsets[index * batch : (index + 1) * batch + 1])


def _check_ids(spec: CollectionSpec, index: int, values: Tensor, borders: Tensor) -> None:
    feature = spec.features[index]
    absent, rows = spec.absent_id(feature), spec.table(feature.table).num_embeddings
    begin = int(borders[0])
    ids = values[begin : int(borders[-1])]
    wrong = (ids < 0) | (ids >= rows)
    at = _first(wrong if absent is None else wrong & (ids != absent))
    if at is None:
        return
    position = torch.tensor([begin + at], dtype=borders.dtype, device=borders.device)
    sample = int(torch.searchsorted(borders, position, right=True)) - 1
    id_dtype = "int32" if values.dtype is _INT32 else "int64"
    raise bad_id(spec, index, int(ids[at]), sample, begin + at - int(borders[sample]), id_dtype)


def _first(flags: Tensor) -> int | None:
    """The index of the first True, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None
