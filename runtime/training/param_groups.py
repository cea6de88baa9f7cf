"""The parameter groups of `module.optimizer`, whose entries are the hyperparameters that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from torch import Tensor

from embforge.codegen.rules.rule import HYPER
from embforge.training.numbers import Numbers
from embforge.training.rule_groups import TableOptimizer

INTERNAL_NUMBERS = tuple(name for name in HYPER if name != "lr")
"""Numbers that every kernel reads but no rule has, such as the loss scale. Parameter groups do not have them."""
PAIRS = {"betas": ("beta1", "beta2")}
"""Entries in which torch's optimizers, and therefore schedulers, hold two numbers."""
OF_SCHEDULERS = ("initial_", "max_", "min_", "base_", "swa_")
"""Schedulers add entries whose names are one of these prefixes and the name of a number."""


class ParamGroup(dict[str, Any]):
    """A parameter group. Writing an entry writes the number in the memory that kernels read.

    ValueError for entries that no kernel reads. RuleError for values that the optimizer's constructor would refuse too.
    `place`: the number of the group in its module. `labels`: entries that say which tables the group trains; they
    cannot be changed.
    """

    def __init__(
        self, numbers: Numbers, place: int, optimizer: TableOptimizer, anchor: Tensor, labels: Mapping[str, Any]
    ) -> None:
        self._numbers, self._place, self._check, self._labels = numbers, place, optimizer.check, dict(labels)
        self._names = [name for name in numbers.names(place) if name not in INTERNAL_NUMBERS]
        self._pairs = {name: parts for name, parts in PAIRS.items() if {*parts} <= {*self._names}}
        entries = {name: numbers.get(name, place) for name in self._names}
        super().__init__({"params": [anchor], **self._labels, **entries})
        if isinstance(optimizer.lr, Tensor):
            self._renew("lr")
        self._renew_pairs()

    def moved(self, anchor: Tensor) -> None:
        """Updates the entries after the hyperparameters have moved to another device, where `anchor` is."""
        self["params"] = [anchor]
        for name in self._names:
            if isinstance(self.get(name), Tensor):
                self._renew(name)

    def _renew(self, name: str) -> None:
        """Sets an entry to the tensor that kernels read now."""
        super().__setitem__(name, self._numbers.live(name, self._place))

    def _renew_pairs(self) -> None:
        for name, parts in self._pairs.items():
            super().__setitem__(name, tuple(self[part] for part in parts))

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_entry(key, value)
        if key in self._pairs:
            for part, number in zip(self._pairs[key], value, strict=True):
                self[part] = number
        elif key in self._names:
            self._numbers.set(key, value, self._place)
            if isinstance(value, Tensor) or isinstance(self.get(key), Tensor):
                self._renew(key)  # users may write into this tensor, which kernels read
            else:
                super().__setitem__(key, value)
            self._renew_pairs()
        else:
            super().__setitem__(key, value)

    def _check_entry(self, key: str, value: Any) -> None:
        if key in self._pairs:
            parts = self._pairs[key]
            if not isinstance(value, tuple | list) or len(value) != len(parts):
                raise ValueError(f"{key}={value!r} is not allowed; {len(parts)} numbers: {', '.join(parts)}")
            for part, number in zip(parts, value, strict=True):
                self._check_entry(part, number)
        elif key in self._names:
            # Only lr may stay a tensor; a CPU tensor of one element is accepted as the value of any other number.
            is_number = isinstance(value, Tensor) and key != "lr" and value.numel() == 1 and value.is_cpu
            self._check(key, float(value) if is_number else value)
        elif key in self._labels:
            if value != self._labels[key]:
                raise ValueError(
                    f"{key}={value!r} is not allowed: this group is that of {self._labels[key]!r}, which cannot change"
                )
        elif not self._is_schedulers(key) and key != "params":
            known = ", ".join([*self._names, *self._pairs])
            raise ValueError(
                f"{key!r} is not part of this optimizer, whose numbers are {known}; "
                "options such as weight_decay are given when it is made: ef.optim.Adam(weight_decay=...)"
            )

    def _is_schedulers(self, key: str) -> bool:
        of = (*self._names, *self._pairs, "momentum")
        return any(key == begin + name for begin in OF_SCHEDULERS for name in of)

    def added(self) -> dict[str, Any]:
        """The entries that schedulers have added."""
        return {key: value for key, value in self.items() if self._is_schedulers(key)}

    def check_all(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a loaded group that `update` may write. ValueError or RuleError if another optimizer has saved
        them."""
        loaded = {key: value for key, value in entries.items() if key != "params"}
        missing = [name for name in self._names if name not in loaded]
        unknown = [key for key in loaded if key not in self and not self._is_schedulers(key)]
        if missing or unknown:
            raise ValueError(
                f"state_dict: it is that of another optimizer: it has {', '.join(loaded)}; module.optimizer has "
                f"{', '.join(self._names)}"
            )
        for key, value in loaded.items():
            self._check_entry(key, value)
        return {key: value for key, value in loaded.items() if key not in self._pairs}

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> ParamGroup:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy has the values of the numbers, and writing to it changes no module


class ParamGroups(list[Any]):
    """`param_groups`: a list whose groups can be written to, but not replaced."""

    def __setitem__(self, place: SupportsIndex | slice, group: Any) -> None:
        if group is not self[place]:
            raise RuntimeError(
                "a group of module.optimizer.param_groups cannot be replaced: kernels would not read the new one; "
                'write its entries, as param_groups[0]["lr"] = 0.1, or param_groups[0].update(...)'
            )
