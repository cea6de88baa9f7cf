"""The numbers of a fused optimizer that kernels read from memory: none of them is compiled in."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from embforge.codegen.rules.rule import COUNTERS, HYPER, Update
from embforge.storage.states import versioned
from embforge.torch_internals import can_take_data, current_node, current_pass, will_run
from embforge.training.recompute import Forwards
from embforge.training.scaling import refuse_unknown_scaler, watch_scalers

STEP, SEED = COUNTERS.index("step"), COUNTERS.index("seed")
LR, GRAD_SCALE = HYPER.index("lr"), HYPER.index("grad_scale")
HYPER_ADDRESS = "_embforge_hyper"
"""An anchor's attribute: where the hyperparameters lie that it belongs to. A number, so that anchors can be pickled."""
NUMBERS = "_embforge_numbers"
"""Attribute of the hyperparameters, and of the first table: a weak reference to the `Numbers` they belong to. By it
an operator, which is given tensors alone, knows of what is not in a tensor, also in a compiled graph."""
MOVED = (
    "the module has moved to another device since this forward, so that the rows it read are not those of the module "
    "any more; run the backward before moving the module"
)


class Numbered(Protocol):
    """What an optimizer says of its numbers."""

    @property
    def lr(self) -> float | Tensor: ...
    @property
    def update(self) -> Update: ...
    @property
    def hyper_values(self) -> tuple[float, ...]: ...


class Numbers:
    """Hyperparameters, counters and the grad anchor of one module, on its device.

    Kernels read them when they run, so schedulers, loss scalers and captured graphs change them without a compiler.
    Where several optimizers train, the hyperparameters of all lie in one tensor, one optimizer's after the other's.
    """

    def __init__(self, optimizers: Sequence[Numbered], device: torch.device) -> None:
        self._names = [(*HYPER, *optimizer.update.rule.hyper) for optimizer in optimizers]
        self._values: list[float] = []  # what `hyper` is filled with where memory begins
        for optimizer in optimizers:
            lr = optimizer.lr.detach() if isinstance(optimizer.lr, Tensor) else optimizer.lr
            self._values += [float(lr), 0.0, *map(float, optimizer.hyper_values)]
        self._seed: int | None = None
        self.scale: Tensor | None = None
        """What a GradScaler multiplies losses by, where it keeps that; None if there is none, or it is off."""
        self.forwards = Forwards()
        watch_scalers()
        with torch.inference_mode(False):  # what is made there has no version, by which changes are known
            self.hyper = torch.tensor(self._values, dtype=torch.float64, device="cpu").to(device)
            self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
            self.anchor = self._new_anchor(device)
            """What autograd sees of fused tables: its gradient is 0, or infinite where an update was skipped."""
        self.own(self.hyper)
        self.lock = Lock()
        """One update at a time, whatever thread a backward runs in; and what accumulates is taken or used up."""

    def seed(self, seed: int) -> None:
        """Sets the key of stochastic rounding; on meta, as soon as there is memory."""
        self._seed = seed
        if not self.counters.is_meta:
            self.counters[SEED] = seed

    def clear_verdict(self) -> None:
        """Makes a loss scaler see nothing of earlier backward passes: 0, and not no gradient, which it would refuse."""
        self.anchor.grad = torch.zeros_like(self.anchor)

    def own(self, tensor: Tensor) -> None:
        """Makes a tensor tell whose it is: `numbers_of`."""
        setattr(tensor, NUMBERS, ref(self))

    def take_scale(self) -> None:
        """Reads what the loss of the backward pass that runs now was multiplied by, without waiting for the device.

        RuntimeError if it sees that this was done by a scaler that the module does not know.
        """
        refuse_unknown_scaler(self.scale)
        if self.scale is not None:
            self.set_grad_scale(self.scale)

    def note_forward(self, *, in_node: bool = False) -> None:
        """Every forward tells. RuntimeError for one that is repeated after rows have changed. `in_node`: its autograd
        node has been made already."""
        self.forwards.note(self.counters._version, in_node=in_node)

    def names(self, group: int = 0) -> tuple[str, ...]:
        """The hyperparameters of an optimizer, in the order in which kernels read them."""
        return self._names[group]

    def get(self, name: str, group: int = 0) -> float:
        """A hyperparameter's value."""
        place = self._place(name, group)
        return self._values[place] if self.hyper.is_meta else float(self.hyper[place])

    def values(self, group: int = 0) -> list[float]:
        """All hyperparameters of an optimizer, in the order in which kernels read them. Waits for the device."""
        first = self._place(HYPER[0], group)
        values: list[float] = self.hyper[first : first + len(self._names[group])].tolist()
        return values

    def live(self, name: str, group: int = 0) -> Tensor:
        """A hyperparameter as the number in memory that kernels read."""
        return self.hyper[self._place(name, group)]

    def set_grad_scale(self, value: float | Tensor) -> None:
        """Writes what losses are multiplied by, 0 for nothing, for all optimizers."""
        for group in range(len(self._names)):
            self.set("grad_scale", value, group)

    def _place(self, name: str, group: int) -> int:
        return sum(map(len, self._names[:group])) + self._names[group].index(name)

    def set(self, name: str, value: float | Tensor, group: int = 0) -> None:
        """Writes a hyperparameter where kernels read it."""
        place = self._place(name, group)
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
        with torch.inference_mode(False):
            hyper = self.hyper if known else torch.tensor(self._values, dtype=torch.float64, device="cpu")
            counters = self.counters if known else torch.zeros(len(COUNTERS), dtype=torch.int64, device="cpu")
            self.hyper, self.counters = hyper.to(device), counters.to(device)
        self.own(self.hyper)
        if not known and not self.counters.is_meta:
            self.seed(drawn_seed() if self._seed is None else self._seed)
        if can_take_data(self.anchor, self.hyper):
            self.anchor.data = torch.zeros(
                1, dtype=torch.float32, device=device
            )  # the facade's parameter stays the same object
            setattr(self.anchor, HYPER_ADDRESS, self.hyper.data_ptr())
        else:
            self.anchor = self._new_anchor(device)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("anchor", "lock", "scale", "forwards")
        kept = {key: value for key, value in self.__dict__.items() if key not in left_out}
        return kept | {"hyper": self.hyper.detach()}  # without its attribute, which cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock, self.scale, self.forwards = Lock(), None, Forwards()
        watch_scalers()
        self.hyper, self.counters = versioned(self.hyper), versioned(self.counters)
        self.own(self.hyper)
        self.set_grad_scale(0.0)  # a copy does not know the scaler, and divides by nothing
        with torch.inference_mode(False):
            self.anchor = self._new_anchor(self.hyper.device)

    def _new_anchor(self, device: torch.device) -> Tensor:
        anchor = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        setattr(anchor, HYPER_ADDRESS, self.hyper.data_ptr())
        return anchor


def update_is_wanted(hyper: Tensor) -> bool:
    """Whether the backward pass that runs now reaches the rows whose optimizer has these numbers.

    `torch.autograd.grad(loss, dense.parameters())` and `backward(inputs=...)` may run a lookup's node for the gradient
    of its weights alone: then the anchor, which stands for the rows, is not among what this pass asked for. Outside of
    a backward pass the caller means an update.
    """
    node = current_node() if current_pass() != -1 else None
    for reached, _ in () if node is None else node.next_functions:
        if reached is None:
            continue
        if getattr(getattr(reached, "variable", None), HYPER_ADDRESS, None) == hyper.data_ptr():
            try:
                return will_run(reached)
            except RuntimeError:  # torch refuses to say it of a leaf that torch.autograd.grad was asked for
                return True
    return True


def numbers_of(tensor: Tensor) -> Numbers | None:
    """Whose hyperparameters or rows a tensor holds, if a module's."""
    owner: ref[Numbers] | None = getattr(tensor, NUMBERS, None)
    return None if owner is None else owner()


def drawn_seed() -> int:
    """A key of stochastic rounding from torch's generator."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
