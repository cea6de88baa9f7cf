"""Ids of many bags of different lengths as one value, with what the host already knows about their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.input_forms import Parts, from_lists, from_mapping, from_padded
from embforge.torch_internals import collating


@dataclass(frozen=True, eq=False)
class Jagged:
    """The input of a lookup: `values[N]`, and `offsets[F*B+1]` or `lengths[F*B]` or `[F, B]`, feature-major.

    `rows_per_feature` (ids per feature) lets the outputs of `none` features be sized without asking the device.
    `num_features` is F, without which a batch cannot be cut by samples; two-dimensional lengths and `rows_per_feature`
    tell it too. A module checks the tensors when it is called; here only what can be said without their module.

    It goes through a DataLoader (`collate_fn=ef.collate`), pinned memory and `to(device, non_blocking=True)`.
    """

    values: Tensor
    offsets: Tensor | None = None
    lengths: Tensor | None = None
    weights: Tensor | None = None
    rows_per_feature: tuple[int, ...] | None = None
    num_features: int | None = None

    def __post_init__(self) -> None:
        if (self.offsets is None) == (self.lengths is None):
            given = "neither" if self.offsets is None else "both"
            raise ValueError(f"Jagged: offsets and lengths: {given} given; give exactly one of them")
        if self.rows_per_feature is not None:
            object.__setattr__(self, "rows_per_feature", tuple(map(int, self.rows_per_feature)))
        known = {
            "num_features": self.num_features,
            "rows_per_feature": None if self.rows_per_feature is None else len(self.rows_per_feature),
            "lengths": self.lengths.shape[0] if self.lengths is not None and self.lengths.dim() == 2 else None,
        }
        told = {name: number for name, number in known.items() if number is not None}
        if len(set(told.values())) > 1:
            said = ", ".join(f"{name} says {number}" for name, number in told.items())
            raise ValueError(f"Jagged: the number of features differs: {said}; lengths are [features, batch]")
        features = next(iter(told.values()), None)
        if features is not None and (features < 1 or self._bags() % features):
            raise ValueError(
                f"Jagged: {self._bags()} bags do not fit {features} features; give lengths [features * batch] or "
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
        """From one list per sample, which holds one list of ids (or one id) per feature: `samples[b][f]`.

        `weights` has the form of `samples`. `num_features` is needed only if there may be no sample.
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
        """From ids `[batch, features, ids]` or `[batch, features]`, without those that only pad.

        Which these are: all after the first `lengths[f, b]` of a bag, or all equal to `padding`; with neither, none
        are. `weights` has the shape of `ids`.
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
        """From a mapping of feature to its ids in any form that a module's call takes, see docs/inputs.md.

        `names`: the features, in the order of the spec that will look them up; other keys are left alone. None: all
        keys, in the mapping's order, which must then be the spec's. `device`: where lists go.
        """
        order = list(features) if names is None else list(names)
        return _made(from_mapping(features, order, torch.device(device or "cpu")), len(order))

    # ---- Elsewhere ----------------------------------------------------------------------------------------

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Jagged:
        """The same on another device. `non_blocking` copies run beside the host if the source is pinned."""
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
        """The batch of one sample or of a slice of them, in their order. On a GPU this waits for the device."""
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
        places = torch.repeat_interleave(kept.reshape(-1), lengths.reshape(-1), output_size=self.values.numel())
        own = lengths[:, chosen.start : chosen.stop : chosen.step].contiguous()
        return Jagged(
            self.values[places],
            lengths=own,
            weights=None if self.weights is None else self.weights[places],
            rows_per_feature=tuple(own.sum(1).tolist()) if own.is_cpu else None,
        )

    @staticmethod
    def concatenate(batches: Sequence[Jagged]) -> Jagged:
        """The samples of several batches, one after the other."""
        if not batches:
            raise ValueError("Jagged: no batch to concatenate; give at least one")
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

    It also joins `Jagged` batches, and keeps lists of whole numbers as one list per sample, where torch's own would
    take the first ids of all samples for one list.
    """
    torch_own = collating()
    by_type = {**torch_own.default_collate_fn_map, Jagged: _join, list: _bags}
    return torch_own.collate(samples, collate_fn_map=by_type)


def _bags(lists: Sequence[list[Any]], *, collate_fn_map: Any = None) -> Any:
    """Lists of ids as they are; other lists as torch joins them."""
    if all(isinstance(number, int) for bag in lists for number in bag):
        return list(lists)
    others = {kind: join for kind, join in collate_fn_map.items() if kind is not list}
    return collating().collate(lists, collate_fn_map=others)


def _join(batches: Sequence[Jagged], *, collate_fn_map: Any = None) -> Jagged:
    return Jagged.concatenate(batches)


def _made(parts: Parts, features: int) -> Jagged:
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
            "Jagged: where a sample's bags are depends on the number of features; give num_features=, or lengths "
            "[features, batch]"
        )
    return batch.num_features


def _lengths_of(batch: Jagged) -> Tensor:
    if batch.lengths is not None:
        return batch.lengths
    assert batch.offsets is not None
    return batch.offsets.diff()


def _sizes_of(batch: Jagged) -> tuple[int, ...]:
    """Ids per feature."""
    if batch.rows_per_feature is not None:
        return batch.rows_per_feature
    return tuple(_lengths_of(batch).reshape(_features_of(batch), -1).sum(1).tolist())


def _weights_of(batch: Jagged) -> Tensor:
    return torch.ones_like(batch.values, dtype=torch.float32) if batch.weights is None else batch.weights


def _by_feature(tensors: Sequence[Tensor], sizes: Sequence[tuple[int, ...]]) -> Tensor:
    """Tensors whose parts belong to features, as one: the parts of the first feature, then those of the second."""
    parts = [tensor.split(list(own)) for tensor, own in zip(tensors, sizes, strict=True)]
    return torch.cat([part for feature in zip(*parts, strict=True) for part in feature])
