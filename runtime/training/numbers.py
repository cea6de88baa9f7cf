"""The numbers of a fused optimizer that kernels read from memory: none of them is compiled in."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.rules.rule import COUNTERS, HYPER, Rule

STEP, SEED = COUNTERS.index("step"), COUNTERS.index("seed")
LR, GRAD_SCALE = HYPER.index("lr"), HYPER.index("grad_scale")


class Numbers:
    """Hyperparameters, counters and the grad anchor of one module, on its device.

    Kernels read them when they run, so schedulers, loss scalers and captured graphs change them without a compiler.
    """

    def __init__(self, rule: Rule, lr: float | Tensor, values: tuple[float, ...], device: torch.device) -> None:
        self.names = (*HYPER, *rule.hyper)
        self._values = [float(lr), 0.0, *map(float, values)]  # what `hyper` is filled with where memory begins
        self.hyper = torch.tensor(self._values, dtype=torch.float64).to(device)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.anchor = torch.zeros(1, device=device, requires_grad=True)
        """What autograd sees of fused tables: its gradient is 0, or infinite where an update was skipped."""
        self.lock = Lock()
        """One update at a time, whatever thread a backward runs in."""

    def get(self, name: str) -> float:
        """A hyperparameter's value."""
        place = self.names.index(name)
        return self._values[place] if self.hyper.is_meta else float(self.hyper[place])

    def live(self, name: str) -> Tensor:
        """A hyperparameter as the number in memory that kernels read."""
        return self.hyper[self.names.index(name)]

    def set(self, name: str, value: float | Tensor) -> None:
        """Writes a hyperparameter where kernels read it."""
        place = self.names.index(name)
        if isinstance(value, Tensor):
            self.hyper[place].copy_(value.detach().reshape(()))
        elif not self.hyper.is_meta:
            self.hyper[place].fill_(value)
            self._values[place] = float(value)
        else:
            self._values[place] = float(value)

    def move(self, device: torch.device) -> None:
        """To another device, with all that is known; from meta nothing but the values given by numbers is."""
        known = not self.hyper.is_meta
        hyper = self.hyper if known else torch.tensor(self._values, dtype=torch.float64, device="cpu")
        counters = self.counters if known else torch.zeros(len(COUNTERS), dtype=torch.int64, device="cpu")
        self.hyper, self.counters = hyper.to(device), counters.to(device)
        if torch._has_compatible_shallow_copy_type(self.anchor, self.hyper):
            self.anchor.data = torch.zeros(1, device=device)  # the facade's parameter stays the same object
        else:
            self.anchor = torch.zeros(1, device=device, requires_grad=True)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("anchor", "lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = Lock()
        self.anchor = torch.zeros(1, device=self.hyper.device, requires_grad=True)
