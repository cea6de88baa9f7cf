"""A parameter group of `module.optimizer`: its entries are the numbers that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from torch import Tensor

from embforge.codegen.rules.rule import HYPER
from embforge.training.numbers import Numbers
from embforge.training.rule_groups import TableOptimizer

NOT_FOR_USERS = tuple(name for name in HYPER if name != "lr")
"""Numbers that are not hyperparameters of the rule."""
PAIRS = {"betas": ("beta1", "beta2")}
"""Entries that torch's optimizers, and so schedulers, have for two numbers."""
OF_SCHEDULERS = ("initial_", "max_", "min_", "base_", "swa_")
"""What the names of entries begin with that schedulers add; a number's name follows."""


class Group(dict[str, Any]):
    """A parameter group whose numbers are where kernels read them: writing one is all that it takes.

    Refused are entries that nobody would read, and values that the optimizer would not take when it is made.
    `place`: which group of the module it is. `labels`: entries that say whose numbers these are, and stay as they are.
    """

    def __init__(
        self, numbers: Numbers, place: int, optimizer: TableOptimizer, anchor: Tensor, labels: Mapping[str, Any]
    ) -> None:
        self._numbers, self._place, self._check, self._labels = numbers, place, optimizer.check, dict(labels)
        self._names = [name for name in numbers.names(place) if name not in NOT_FOR_USERS]
        self._pairs = {name: parts for name, parts in PAIRS.items() if {*parts} <= {*self._names}}
        entries = {name: numbers.get(name, place) for name in self._names}
        super().__init__({"params": [anchor], **self._labels, **entries})
        if isinstance(optimizer.lr, Tensor):
            self._renew("lr")
        self._renew_pairs()

    def moved(self, anchor: Tensor) -> None:
        """The numbers have gone to another device, where `anchor` is."""
        self["params"] = [anchor]
        for name in self._names:
            if isinstance(self.get(name), Tensor):
                self._renew(name)

    def _renew(self, name: str) -> None:
        """Makes an entry the tensor that kernels read, as it lies now."""
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
                self._renew(key)  # what is written into this tensor is where kernels read it
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
            # Only lr may be a tensor while it trains: others are numbers, if given as a tensor of one.
            one = isinstance(value, Tensor) and key != "lr" and value.numel() == 1 and value.is_cpu
            self._check(key, float(value) if one else value)
        elif key in self._labels:
            if value != self._labels[key]:
                raise ValueError(
                    f"{key}={value!r} is not allowed: these are the numbers of {self._labels[key]!r}, and stay so"
                )
        elif not self._is_schedulers(key) and key != "params":
            known = ", ".join([*self._names, *self._pairs])
            raise ValueError(
                f"{key!r} is not part of this optimizer, whose numbers are {known}; "
                "options as weight_decay are given when it is made: ef.optim.Adam(weight_decay=...)"
            )

    def _is_schedulers(self, key: str) -> bool:
        of = (*self._names, *self._pairs, "momentum")
        return any(key == begin + name for begin in OF_SCHEDULERS for name in of)

    def added(self) -> dict[str, Any]:
        """What schedulers have added."""
        return {key: value for key, value in self.items() if self._is_schedulers(key)}

    def check_all(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """What `update` may take over from such a group: ValueError or RuleError if it is of another optimizer."""
        given = {key: value for key, value in entries.items() if key != "params"}
        missing = [name for name in self._names if name not in given]
        unknown = [key for key in given if key not in self and not self._is_schedulers(key)]
        if missing or unknown:
            raise ValueError(
                f"state_dict: that of another optimizer: has {', '.join(given)}; module.optimizer has "
                f"{', '.join(self._names)}"
            )
        for key, value in given.items():
            self._check_entry(key, value)
        return {key: value for key, value in given.items() if key not in self._pairs}

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Group:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is a copy of the numbers, not a way to change them


class Groups(list[Any]):
    """`param_groups`: entries are written, the group itself stays."""

    def __setitem__(self, place: SupportsIndex | slice, group: Any) -> None:
        if group is not self[place]:
            raise RuntimeError(
                "a group of module.optimizer.param_groups cannot be replaced: kernels would not read the new one; "
                'write its entries, as param_groups[0]["lr"] = 0.1, or param_groups[0].update(...)'
            )
