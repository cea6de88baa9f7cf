"""`module.optimizer`: what schedulers, gradient scalers and training loops know as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from embforge.training.group import Group, Groups
from embforge.training.numbers import Numbers
from embforge.training.rule_groups import RuleGroup, RuleGroups

SCALER_UNKNOWN = (
    "scaler.step(module.optimizer): the module does not know this GradScaler, so its rows were updated from gradients "
    "of the scaled loss; call module.use_grad_scaler(scaler) before the first forward, and start from fresh rows"
)
MODULE_GONE = (
    "module.optimizer: its module is gone, and its tables with it; keep the module as long as its optimizer is used"
)


LABELS = ("name", "tables")
"""Entries of a group that say which tables its numbers are of, where optimizers were given by table."""
CYCLED = ("betas", "momentum")
"""What schedulers that cycle the momentum write: the first of these that is among the defaults, in every group."""


class Steps(Protocol):
    """What the facade needs of a module."""

    @property
    def optimizer(self) -> FusedOptimizer | None: ...
    def step(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def has_grad_scaler(self) -> bool: ...


class FusedOptimizer(Optimizer):
    """Rows are updated by the backward pass. This object carries the hyperparameters, in one group per optimizer.

    `step()` acts only if gradients accumulate, `zero_grad()` drops what has accumulated. It does not keep its module
    alive, so that tables are freed with the module that holds them. Copies and pickles are those of the module's copy:
    they hold the whole module, unless that is copied along with them.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler call `step()` always, and say so: rows look after what is not finite themselves."""
    copied_module: Steps | None = None
    """The module that a copy of an optimizer came with."""

    def __init__(self, module: Steps, numbers: Numbers, groups: RuleGroups) -> None:
        self._module, self._numbers = ref(module), numbers
        self._groups = [
            Group(numbers, place, group.optimizer, self._anchor(place), _labels(groups, group))
            for place, group in enumerate(groups.groups)
        ]
        first, *others = self._groups
        common = [key for key in first if key not in LABELS and all(key in other for other in others)]
        self._complete = False
        super().__init__(self._groups, {key: first[key] for key in common if key != "params"})
        self._complete = True
        self.param_groups = Groups(self.param_groups)
        self.defaults = _Defaults(self.defaults, self._groups)

    def _anchor(self, place: int) -> Tensor:
        """A group's parameter. The first stands for the rows of all tables in graphs, others only for their group."""
        anchor = self._numbers.anchor
        return torch.zeros_like(anchor, requires_grad=True) if place else anchor

    def _owner(self) -> Steps:
        module = self._module()
        if module is None:
            raise RuntimeError(MODULE_GONE)
        return module

    def moved(self) -> None:
        """The numbers have gone to another device."""
        for place, group in enumerate(self._groups):
            group.moved(self._anchor(place))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates rows from accumulated gradients; without accumulation the backward pass has done it already."""
        loss = closure() if closure is not None else None
        module = self._owner()
        if hasattr(self, "found_inf") and not module.has_grad_scaler():  # set by a GradScaler
            raise RuntimeError(SCALER_UNKNOWN)
        module.step()
        self._numbers.clear_verdict()  # the scaler has seen it; gradients would add up, and stay infinite for ever
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets accumulated gradients."""
        self._numbers.clear_verdict()
        self._owner().drop_gradients()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the hyperparameters over. Rows and states are in the module's own state dict."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self._groups):
            raise ValueError(
                f"state_dict: {len(groups)} parameter groups; allowed: {len(self._groups)}, as module.optimizer has"
            )
        checked = [group.check_all(entries) for group, entries in zip(self._groups, groups, strict=True)]
        for group, entries in zip(self._groups, checked, strict=True):
            group.update(entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a fused optimizer trains the tables of its module and nothing else."""
        if self._complete:
            raise RuntimeError(
                "module.optimizer trains the tables of its module only; give other parameters to another optimizer"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        return _optimizer_of, (self._owner(),), {"added": [group.added() for group in self._groups]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group, added in zip(self._groups, state["added"], strict=True):
            group.update(added)


class _Defaults(dict[str, Any]):
    """What all groups have. Schedulers look here whether they can cycle the momentum, and are told why they cannot."""

    def __init__(self, common: dict[str, Any], groups: Sequence[Group]) -> None:
        super().__init__(common)
        having = [any(key in group for key in CYCLED) for group in groups]
        self._lacking = "" if all(having) or not any(having) else groups[having.index(False)]["name"]
        self._differ = all(having) and not any(key in common for key in CYCLED)

    def __contains__(self, key: object) -> bool:
        if key in CYCLED and (self._lacking or self._differ):
            why = f"the optimizer of {self._lacking!r} has none" if self._lacking else "here some have betas instead"
            raise ValueError(
                "module.optimizer: a scheduler cycles the momentum if all groups have one under the same name, and "
                f"{why}; give it cycle_momentum=False, and write the momentum of a group where it shall change"
            )
        return super().__contains__(key)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _labels(groups: RuleGroups, group: RuleGroup) -> dict[str, Any]:
    return dict(zip(LABELS, (group.name, groups.table_names(group)), strict=True)) if group.name else {}


def _optimizer_of(module: Steps) -> FusedOptimizer:
    """The optimizer of a copy, which may be all that holds the copied module."""
    optimizer = module.optimizer
    assert optimizer is not None
    optimizer.copied_module = module
    return optimizer
