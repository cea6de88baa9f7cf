"""`Jagged`: the input of a lookup as one object that a DataLoader can make, pin and move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.input_forms import RawInput, from_lists, from_mapping, from_padded
from embforge.torch_internals import collating


@dataclass(frozen=True, eq=False)
class Jagged:
    """The input of a lookup: `values[N]`, and `offsets[F*B+1]` or `lengths[F*B]` or `[F, B]`, feature-major.

    `rows_per_feature`: the number of ids of each feature; with it, results of `none` features can be allocated without
    waiting for the device. `num_features`: F, which is needed to select samples of a batch; two-dimensional lengths and
    `rows_per_feature` determine it too. Only what does not depend on a module is checked here; a module checks the
    tensors when it is called.

    It works with a DataLoader (`collate_fn=ef.collate`), pinned memory and `to(device, non_blocking=True)`.
    """

    values: Tensor
    offsets: Tensor | None = None
    lengths: Tensor | None = None
    weights: Tensor | None = None
    rows_per_feature: tuple[int, ...] | None = None
    num_features: int | None = None

    def __post_init__(self) -> None:
        if (self.offsets is None) == (self.lengths is None):
            passed = "neither was" if self.offsets is None else "both were"
            raise ValueError(f"Jagged: offsets and lengths: {passed} passed; pass exactly one of them")
        if self.rows_per_feature is not None:
            object.__setattr__(self, "rows_per_feature", tuple(map(int, self.rows_per_feature)))
        possible = {
            "num_features": self.num_features,
            "rows_per_feature": None if self.rows_per_feature is None else len(self.rows_per_feature),
            "lengths": self.lengths.shape[0] if self.lengths is not None and self.lengths.dim() == 2 else None,
        }
        known = {name: number for name, number in possible.items() if number is not None}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{name} says {number}" for name, number in known.items())
            raise ValueError(f"Jagged: the number of features differs: {listed}; lengths are [features, batch]")
        features = next(iter(known.values()), None)
        if features is not None and (features < 1 or self._bags() % features):
            raise ValueError(
                f"Jagged: {self._bags()} bags do not fit {features} features; pass lengths [features * batch] or "
                "offsets [features * batch + 1], the bags of the first feature first"
            )
        object.__setattr__(self, "num_features", features)

    # ---- From other forms ---------------------------------------------------------------------------------

    @classmethod
    def from_lists(
        cls,
        samples: Sequence[Sequence[Any]],
        weights: Sequence[Sequence[Any]] | None = None,
        *,
        num_features: int | None = None,
        device: torch.device | str | None = None,
    ) -> Jagged:
        """A batch from one list per sample, which holds one list of ids (or one id) per feature: `samples[b][f]`.

        `weights` has the form of `samples`. `num_features` is only needed if `samples` may be empty.
        """
        return _made(*from_lists(samples, weights, num_features, torch.device(device or "cpu")))

    @classmethod
    def from_padded(
        cls,
        ids: Tensor,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        padding: int | None = None,
    ) -> Jagged:
        """A batch from ids `[batch, features, ids]` or `[batch, features]`, without the ids that only fill bags up.

        These are all ids after the first `lengths[f, b]` of a bag, or all ids equal to `padding`. Without both
        arguments, all ids count. `weights` has the shape of `ids`.
        """
        return _made(*from_padded(ids, lengths, weights, padding))

    @classmethod
    def from_dict(
        cls,
        features: Mapping[str, Any],
        names: Sequence[str] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Jagged:
        """A batch from a mapping of features to their ids, in any form that a call of a module takes, see
        docs/inputs.md.

        `names`: the features in the order of the module's spec; other keys are ignored. None means all keys, whose
        order must then be that of the spec. `device`: the device for ids that are lists.
        """
        order = list(features) if names is None else list(names)
        return _made(from_mapping(features, order, torch.device(device or "cpu")), len(order))

    # ---- On other devices ---------------------------------------------------------------------------------

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Jagged:
        """The same batch on another device. With `non_blocking`, the host does not wait for copies from pinned
        memory."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        """A copy in pinned memory, as a DataLoader with `pin_memory=True` makes it."""
        return self._with(Tensor.pin_memory)

    def is_pinned(self) -> bool:
        """Whether all its tensors are in pinned memory."""
        return all(tensor.is_pinned() for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("values", "offsets", "lengths", "weights")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _with(self, function: Callable[[Tensor], Tensor]) -> Jagged:
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changed)

    # ---- Samples ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of samples."""
        return self._bags() // _features_of(self)

    def __iter__(self) -> Iterator[Jagged]:
        return (self[sample] for sample in range(len(self)))

    def __getitem__(self, samples: int | slice) -> Jagged:
        """The batch of one sample, or of a slice of samples in their order. On a GPU it waits for the device."""
        size, features = len(self), _features_of(self)
        if isinstance(samples, slice):
            chosen = range(size)[samples]
            if chosen.step < 0:
                raise ValueError(f"Jagged: step {chosen.step} is not allowed; samples keep their order: a step from 1")
        elif isinstance(samples, int) and not isinstance(samples, bool):
            if not -size <= samples < size:
                raise IndexError(f"Jagged: sample {samples} does not exist; allowed: {-size} to {size - 1}")
            chosen = range(samples % size, samples % size + 1)
        else:
            raise TypeError(f"Jagged: index {samples!r}; allowed: the number of a sample, or a slice of samples")
        lengths = _lengths_of(self).reshape(features, size)
        kept = torch.zeros_like(lengths, dtype=torch.bool)
        kept[:, chosen.start : chosen.stop : chosen.step] = True
        kept_ids = torch.repeat_interleave(kept.reshape(-1), lengths.reshape(-1), output_size=self.values.numel())
        kept_lengths = lengths[:, chosen.start : chosen.stop : chosen.step].contiguous()
        return Jagged(
            self.values[kept_ids],
            lengths=kept_lengths,
            weights=None if self.weights is None else self.weights[kept_ids],
            rows_per_feature=tuple(kept_lengths.sum(1).tolist()) if kept_lengths.is_cpu else None,
        )

    @staticmethod
    def concatenate(batches: Sequence[Jagged]) -> Jagged:
        """One batch with the samples of several batches, in their order."""
        if not batches:
            raise ValueError("Jagged: no batch to concatenate; pass at least one")
        features = _features_of(batches[0])
        if any(_features_of(batch) != features for batch in batches):
            numbers = ", ".join(str(batch.num_features) for batch in batches)
            raise ValueError(f"Jagged: the batches have {numbers} features; all must have the same")
        lengths = [_lengths_of(batch).reshape(features, -1) for batch in batches]
        sizes = [_sizes_of(batch) for batch in batches]
        weighted = any(batch.weights is not None for batch in batches)
        weights = [_weights_of(batch) for batch in batches] if weighted else None
        return Jagged(
            _by_feature([batch.values for batch in batches], sizes),
            lengths=torch.cat(lengths, 1),
            weights=None if weights is None else _by_feature(weights, sizes),
            rows_per_feature=tuple(map(sum, zip(*sizes, strict=True))),
        )

    def _bags(self) -> int:
        if self.lengths is not None:
            return self.lengths.numel()
        assert self.offsets is not None
        return self.offsets.numel() - 1


def collate(samples: list[Any]) -> Any:
    """torch's `default_collate` for samples with ids: `DataLoader(..., collate_fn=ef.collate)`.

    It also joins `Jagged` batches, and keeps lists of whole numbers as one list per sample, where `default_collate`
    would make one list of the first ids of all samples.
    """
    torch_collate = collating()
    by_type = {**torch_collate.default_collate_fn_map, Jagged: _join, list: _bags}
    return torch_collate.collate(samples, collate_fn_map=by_type)


def _bags(lists: Sequence[list[Any]], *, collate_fn_map: Any = None) -> Any:
    """Lists of ids unchanged; other lists joined as torch does it."""
    if all(isinstance(number, int) for bag in lists for number in bag):
        return list(lists)
    others = {kind: join for kind, join in collate_fn_map.items() if kind is not list}
    return collating().collate(lists, collate_fn_map=others)


def _join(batches: Sequence[Jagged], *, collate_fn_map: Any = None) -> Jagged:
    return Jagged.concatenate(batches)


def _made(parts: RawInput, features: int) -> Jagged:
    lengths = parts.lengths if parts.offsets is None else parts.offsets.diff()
    return Jagged(
        parts.values,
        lengths=lengths.reshape(features, -1),
        weights=parts.weights,
        rows_per_feature=parts.rows_per_feature,
    )


def _features_of(batch: Jagged) -> int:
    if batch.num_features is None:
        raise ValueError(
            "Jagged: which bags belong to a sample depends on the number of features; pass num_features=, or lengths "
            "[features, batch]"
        )
    return batch.num_features


def _lengths_of(batch: Jagged) -> Tensor:
    if batch.lengths is not None:
        return batch.lengths
    assert batch.offsets is not None
    return batch.offsets.diff()


def _sizes_of(batch: Jagged) -> tuple[int, ...]:
    """The number of ids of each feature."""
    if batch.rows_per_feature is not None:
        return batch.rows_per_feature
    return tuple(_lengths_of(batch).reshape(_features_of(batch), -1).sum(1).tolist())


def _weights_of(batch: Jagged) -> Tensor:
    return torch.ones_like(batch.values, dtype=torch.float32) if batch.weights is None else batch.weights


def _by_feature(tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]) -> Tensor:
    """Joins tensors by feature: the ids of the first feature in all tensors, then those of the second, and so on."""
    parts = [tensor.split(list(feature_sizes)) for tensor, feature_sizes in zip(tensors, sizes, strict=True)]
    return torch.cat([part for feature in zip(*parts, strict=True) for part in feature])
