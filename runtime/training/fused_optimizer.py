"""`module.optimizer`: a fused optimizer as the torch optimizer that schedulers, gradient scalers and loops expect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from embforge.pickle_layout import with_layout, without_layout
from embforge.training.numbers import Numbers
from embforge.training.param_groups import ParamGroup, ParamGroups
from embforge.training.rule_groups import RuleGroup, RuleGroups

SCALER_UNKNOWN = (
    "scaler.step(module.optimizer): the module does not know this GradScaler, so its rows were updated from gradients "
    "of the scaled loss; call module.use_grad_scaler(scaler) before the first forward, and start from fresh rows"
)
MODULE_GONE = (
    "module.optimizer: its module is gone, and its tables with it; keep the module for as long as you use its optimizer"
)


LABELS = ("name", "tables")
"""Entries of a parameter group that say which tables it trains. Only modules with a mapping of optimizers have them."""
CYCLED = ("betas", "momentum")
"""Entries that schedulers which cycle the momentum may write. They write the first one that is in the defaults."""


class OptimizedModule(Protocol):
    """What `FusedOptimizer` needs of its module."""

    @property
    def optimizer(self) -> FusedOptimizer | None: ...
    def step(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def has_grad_scaler(self) -> bool: ...


class FusedOptimizer(Optimizer):
    """The hyperparameters of a module's fused optimizers, in one parameter group per optimizer.

    The backward pass updates rows. `step()` acts only if gradients accumulate, and `zero_grad()` drops accumulated
    gradients. The object does not keep its module alive, so that tables are freed with their module. A copy or a pickle
    contains a copy of the whole module, unless the module is copied along with it.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler always call `step()`: the kernels themselves skip gradients that are not finite."""
    copied_module: OptimizedModule | None = None
    """In a copy of an optimizer: the copy of its module, which it keeps alive."""

    def __init__(self, module: OptimizedModule, numbers: Numbers, groups: RuleGroups) -> None:
        self._module, self._numbers = ref(module), numbers
        self._groups = [
            ParamGroup(numbers, place, group.optimizer, self._anchor(place), _labels(groups, group))
            for place, group in enumerate(groups.groups)
        ]
        first, *others = self._groups
        common = [key for key in first if key not in LABELS and all(key in other for other in others)]
        self._complete = False
        super().__init__(self._groups, {key: first[key] for key in common if key != "params"})
        self._complete = True
        self.param_groups = ParamGroups(self.param_groups)
        self.defaults = _Defaults(self.defaults, self._groups)

    def _anchor(self, place: int) -> Tensor:
        """The parameter of a group. In graphs, that of the first group represents the rows of all tables; those of
        other groups are only entries of their groups."""
        anchor = self._numbers.anchor
        return torch.zeros_like(anchor, requires_grad=True) if place else anchor

    def _live_module(self) -> OptimizedModule:
        module = self._module()
        if module is None:
            raise RuntimeError(MODULE_GONE)
        return module

    def moved(self) -> None:
        """Updates the groups after the hyperparameters have moved to another device."""
        for place, group in enumerate(self._groups):
            group.moved(self._anchor(place))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates rows from accumulated gradients. Without accumulation the backward pass has already updated them."""
        loss = closure() if closure is not None else None
        module = self._live_module()
        if hasattr(self, "found_inf") and not module.has_grad_scaler():  # set by a GradScaler
            raise RuntimeError(SCALER_UNKNOWN)
        module.step()
        self._numbers.clear_verdict()  # the scaler has seen it; verdicts would add up, and stay infinite for ever
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops accumulated gradients."""
        self._numbers.clear_verdict()
        self._live_module().drop_gradients()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the hyperparameters. Rows and states are in the module's own state dict."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self._groups):
            raise ValueError(
                f"state_dict: {len(groups)} parameter groups; allowed: {len(self._groups)}, as module.optimizer has"
            )
        checked = [group.check_all(entries) for group, entries in zip(self._groups, groups, strict=True)]
        for group, entries in zip(self._groups, checked, strict=True):
            group.update(entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: a fused optimizer trains the tables of its module and nothing else."""
        if self._complete:
            raise RuntimeError(
                "module.optimizer trains the tables of its module only; give other parameters to another optimizer"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Any:
        added = [group.added() for group in self._groups]
        return _optimizer_of, (self._live_module(),), with_layout({"added": added})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group, added in zip(self._groups, without_layout(state)["added"], strict=True):
            group.update(added)


class _Defaults(dict[str, Any]):
    """The entries that all groups have. A scheduler that looks here for a momentum to cycle gets a ValueError that says
    why it cannot cycle it."""

    def __init__(self, common: dict[str, Any], groups: Sequence[ParamGroup]) -> None:
        super().__init__(common)
        having = [any(key in group for key in CYCLED) for group in groups]
        self._lacking = "" if all(having) or not any(having) else groups[having.index(False)]["name"]
        self._differ = all(having) and not any(key in common for key in CYCLED)

    def __contains__(self, key: object) -> bool:
        if key in CYCLED and (self._lacking or self._differ):
            why = f"the optimizer of {self._lacking!r} has none" if self._lacking else "here some have betas instead"
            raise ValueError(
                "module.optimizer: a scheduler cycles the momentum if all groups have one under the same name, and "
                f"{why}; make it with cycle_momentum=False, and write the momentum of the groups that should change"
            )
        return super().__contains__(key)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _labels(groups: RuleGroups, group: RuleGroup) -> dict[str, Any]:
    return dict(zip(LABELS, (group.name, groups.table_names(group)), strict=True)) if group.name else {}


def _optimizer_of(module: OptimizedModule) -> FusedOptimizer:
    """The optimizer of a copied module. It keeps the module alive, because there may be no other reference to it."""
    optimizer = module.optimizer
    assert optimizer is not None
    optimizer.copied_module = module
    return optimizer
