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


class Steps(Protocol):
    """What the facade needs of a module."""

    def step(self) -> None: ...
    def drop_gradients(self) -> None: ...


class _Group(dict[str, Any]):
    """A parameter group whose numbers are where kernels read them: writing one is all that it takes."""

    def __init__(self, numbers: Numbers, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._numbers = numbers

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._numbers.names and key not in NOT_FOR_USERS:
            self._numbers.set(key, value)
            if isinstance(self.get(key), Tensor):  # stays the tensor that kernels read
                return
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class FusedOptimizer(Optimizer):
    """Rows are updated by the backward pass. This object carries the hyperparameters, in `param_groups[0]`.

    `step()` acts only if gradients accumulate, `zero_grad()` drops what has accumulated.
    """

    def __init__(self, module: Steps, numbers: Numbers, *, tensor_lr: bool) -> None:
        names = [name for name in numbers.names if name not in NOT_FOR_USERS]
        values: dict[str, Any] = {name: numbers.get(name) for name in names if not numbers.hyper.is_meta}
        if tensor_lr:
            values["lr"] = numbers.hyper[HYPER.index("lr")]
        group = _Group(numbers, {"params": [numbers.anchor], **values})
        super().__init__([group], dict(values))
        self._module = module

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates rows from accumulated gradients; without accumulation the backward pass has done it already."""
        loss = closure() if closure is not None else None
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
