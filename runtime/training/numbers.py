"""The hyperparameters and counters of fused optimizers. Kernels read them from memory: none is compiled in."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from embforge.codegen.rules.rule import COUNTERS, HYPER, Update
from embforge.pickle_layout import with_layout, without_layout
from embforge.storage.states import versioned
from embforge.torch_internals import can_take_data, current_node, current_pass, will_run
from embforge.training.recompute import Forwards
from embforge.training.scaling import refuse_unknown_scaler, watch_scalers

STEP, SEED = COUNTERS.index("step"), COUNTERS.index("seed")
LR, GRAD_SCALE = HYPER.index("lr"), HYPER.index("grad_scale")
HYPER_ADDRESS = "_embforge_hyper"
"""Name of an anchor's attribute: the address of the hyperparameters that it belongs to. It is a number, so that anchors
can be pickled."""
NUMBERS = "_embforge_numbers"
"""Name of an attribute of the hyperparameters' tensor and of the first table: a weak reference to their `Numbers`. An
operator, which gets only tensors, finds by it what is not stored in tensors, also in a compiled graph."""
MOVED = (
    "the module has moved to another device since this forward, so that the rows that it read are no longer those of "
    "the module; run the backward before you move the module"
)


class Numbered(Protocol):
    """The part of an optimizer that says which numbers it has."""

    @property
    def lr(self) -> float | Tensor: ...
    @property
    def update(self) -> Update: ...
    @property
    def hyper_values(self) -> tuple[float, ...]: ...


class Numbers:
    """The hyperparameters, the counters and the grad anchor of one module, on its device.

    Kernels read them when they run, so that schedulers, loss scalers and captured graphs can change them without
    compiling. If a module has several optimizers, one tensor holds the hyperparameters of all, in the optimizers'
    order.
    """

    def __init__(self, optimizers: Sequence[Numbered], device: torch.device) -> None:
        self._names = [(*HYPER, *optimizer.update.rule.hyper) for optimizer in optimizers]
        self._values: list[float] = []  # the hyperparameters, from which `hyper` is filled once it has memory
        for optimizer in optimizers:
            lr = optimizer.lr.detach() if isinstance(optimizer.lr, Tensor) else optimizer.lr
            self._values += [float(lr), 0.0, *map(float, optimizer.hyper_values)]
        self._seed: int | None = None
        self.scale: Tensor | None = None
        """The tensor in which the module's GradScaler keeps its scale; None without a scaler, or if it is disabled."""
        self.forwards = Forwards()
        watch_scalers()
        with torch.inference_mode(False):  # a tensor made in inference mode has no version, by which changes are known
            self.hyper = torch.tensor(self._values, dtype=torch.float64, device="cpu").to(device)
            self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
            self.anchor = self._new_anchor(device)
            """The tensor that represents fused tables in autograd. Its gradient is 0, or infinity if an update was
            skipped."""
        self.own(self.hyper)
        self.lock = Lock()
        """Held during an update and while accumulated gradients change, because backwards may run in several
        threads."""

    def seed(self, seed: int) -> None:
        """Sets the seed of stochastic rounding. On the meta device it takes effect when the module gets memory."""
        self._seed = seed
        if not self.counters.is_meta:
            self.counters[SEED] = seed

    def clear_verdict(self) -> None:
        """Sets the anchor's gradient to 0, so that a loss scaler ignores earlier backward passes. Without any gradient
        a scaler would raise an error."""
        self.anchor.grad = torch.zeros_like(self.anchor)

    def own(self, tensor: Tensor) -> None:
        """Marks a tensor as belonging to this object, so that `numbers_of` finds it."""
        setattr(tensor, NUMBERS, ref(self))

    def take_scale(self) -> None:
        """Copies the scale by which the loss of the current backward pass was multiplied, without waiting for the
        device.

        Raises RuntimeError if a scaler that the module does not know has multiplied it.
        """
        refuse_unknown_scaler(self.scale)
        if self.scale is not None:
            self.set_grad_scale(self.scale)

    def note_forward(self, *, in_node: bool = False) -> None:
        """Called at the start of every forward. RuntimeError if a backward pass repeats the forward after rows have
        changed. `in_node`: the forward runs inside its autograd node, see `Forwards.note`."""
        self.forwards.note(self.counters._version, in_node=in_node)

    def names(self, group: int = 0) -> tuple[str, ...]:
        """The names of an optimizer's hyperparameters, in the order in which kernels read them."""
        return self._names[group]

    def get(self, name: str, group: int = 0) -> float:
        """A hyperparameter's value. Waits for the device."""
        place = self._place(name, group)
        return self._values[place] if self.hyper.is_meta else float(self.hyper[place])

    def values(self, group: int = 0) -> list[float]:
        """The values of an optimizer's hyperparameters, in the order in which kernels read them. Waits for the
        device."""
        first = self._place(HYPER[0], group)
        values: list[float] = self.hyper[first : first + len(self._names[group])].tolist()
        return values

    def live(self, name: str, group: int = 0) -> Tensor:
        """A view of the number in memory that kernels read for a hyperparameter."""
        return self.hyper[self._place(name, group)]

    def set_grad_scale(self, value: float | Tensor) -> None:
        """Writes the factor by which losses are multiplied, for all optimizers; 0 means that they are not
        multiplied."""
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
        """Moves everything to another device. From the meta device only the values that were set as numbers are
        known."""
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
        return with_layout(
            kept | {"hyper": self.hyper.detach()}
        )  # without the attribute NUMBERS, which cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(without_layout(state))
        self.lock, self.scale, self.forwards = Lock(), None, Forwards()
        watch_scalers()
        self.hyper, self.counters = versioned(self.hyper), versioned(self.counters)
        self.own(self.hyper)
        self.set_grad_scale(0.0)  # a copy does not know the scaler, and does not divide gradients
        with torch.inference_mode(False):
            self.anchor = self._new_anchor(self.hyper.device)

    def _new_anchor(self, device: torch.device) -> Tensor:
        anchor = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        setattr(anchor, HYPER_ADDRESS, self.hyper.data_ptr())
        return anchor


def update_is_wanted(hyper: Tensor) -> bool:
    """Whether the current backward pass should update the rows whose optimizer has these hyperparameters.

    `torch.autograd.grad(loss, dense.parameters())` and `backward(inputs=...)` may run a lookup's node only for the
    gradient of its weights. Then the anchor, which represents the rows, is not among the inputs of this pass. Outside
    of a backward pass the caller always wants an update.
    """
    node = current_node() if current_pass() != -1 else None
    for reached, _ in () if node is None else node.next_functions:
        if reached is None:
            continue
        if getattr(getattr(reached, "variable", None), HYPER_ADDRESS, None) == hyper.data_ptr():
            try:
                return will_run(reached)
            except RuntimeError:  # torch raises for a leaf that is an input of torch.autograd.grad
                return True
    return True


def numbers_of(tensor: Tensor) -> Numbers | None:
    """The `Numbers` of the module whose hyperparameters or rows a tensor holds; None if it belongs to no module."""
    reference: ref[Numbers] | None = getattr(tensor, NUMBERS, None)
    return None if reference is None else reference()


def drawn_seed() -> int:
    """A seed of stochastic rounding, drawn from torch's default generator."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
