"""`module.optimizer`: what schedulers, gradient scalers and training loops know as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from embforge.codegen.rules.rule import HYPER
from embforge.training.numbers import Numbers

NOT_FOR_USERS = tuple(name for name in HYPER if name != "lr")
"""Numbers that are not hyperparameters of the rule."""


SCALER_UNKNOWN = (
    "scaler.step(module.optimizer): the module does not know this GradScaler, so its rows were updated from gradients "
    "of the scaled loss; call module.use_grad_scaler(scaler) before the first forward, and start from fresh rows"
)


class Steps(Protocol):
    """What the facade needs of a module."""

    def step(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def has_grad_scaler(self) -> bool: ...


class _Group(dict[str, Any]):
    """A parameter group whose numbers are where kernels read them: writing one is all that it takes."""

    def __init__(self, numbers: Numbers, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._numbers = numbers

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._numbers.names and key not in NOT_FOR_USERS:
            self._numbers.set(key, value)
            if isinstance(value, Tensor) or isinstance(self.get(key), Tensor):
                value = self._numbers.live(key)  # what is written into this tensor is where kernels read it
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class FusedOptimizer(Optimizer):
    """Rows are updated by the backward pass. This object carries the hyperparameters, in `param_groups[0]`.

    `step()` acts only if gradients accumulate, `zero_grad()` drops what has accumulated.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler call `step()` always, and say so: rows look after what is not finite themselves."""

    def __init__(self, module: Steps, numbers: Numbers, *, tensor_lr: bool) -> None:
        names = [name for name in numbers.names if name not in NOT_FOR_USERS]
        values: dict[str, Any] = {name: numbers.get(name) for name in names}
        if tensor_lr:
            values["lr"] = numbers.live("lr")
        group = _Group(numbers, {"params": [numbers.anchor], **values})
        super().__init__([group], dict(values))
        self._module, self._numbers = module, numbers

    def moved(self) -> None:
        """The numbers have gone to another device."""
        group = self.param_groups[0]
        group["params"] = [self._numbers.anchor]
        for name in self._numbers.names:
            if isinstance(group.get(name), Tensor):
                group[name] = self._numbers.live(name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates rows from accumulated gradients; without accumulation the backward pass has done it already."""
        loss = closure() if closure is not None else None
        if hasattr(self, "found_inf") and not self._module.has_grad_scaler():  # set by a GradScaler
            raise RuntimeError(SCALER_UNKNOWN)
        self._module.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets accumulated gradients."""
        super().zero_grad(set_to_none)
        self._module.drop_gradients()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the hyperparameters over. Rows and states are in the module's own state dict."""
        groups = state_dict["param_groups"]
        if len(groups) != 1:
            raise ValueError(f"state_dict: {len(groups)} parameter groups; allowed: 1, as module.optimizer has")
        for key, value in groups[0].items():
            if key != "params":
                self.param_groups[0][key] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a fused optimizer trains the tables of its module and nothing else."""
        if self.param_groups:
            raise RuntimeError(
                "module.optimizer trains the tables of its module only; give other parameters to another optimizer"
            )
        super().add_param_group(param_group)
