"""How a module's tables are trained: by a fused optimizer in the backward pass or in `step()`, or by torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.params import Params
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.training import training_plans
from embforge.inputs import Batch
from embforge.launch.kernels import Program
from embforge.training import pending
from embforge.training.autograd import Call, Lookup
from embforge.training.calls import Programs, Storage, run_reduce, run_update
from embforge.training.facade import FusedOptimizer
from embforge.training.numbers import SEED, STEP, Numbers

RECOMPUTED = (
    "a recomputed forward (torch.utils.checkpoint) would read rows that this backward pass has already updated, and so "
    "give other numbers than the first forward; use accumulate=True, which updates in step(), or call the module "
    "outside of the checkpointed function"
)
REMEMBERED = 256
"""How many forwards are known by their ids, to tell whether one that is repeated reads the rows that it read before."""
_in_backward = torch._C._current_graph_task_id


class Trainer:
    """The training of one module. `optimizer`: an object of `embforge.optim`, or None for torch's sparse gradients."""

    def __init__(self, optimizer: Any, accumulate: bool, device: torch.device) -> None:
        if optimizer is not None and not isinstance(getattr(optimizer, "update", None), Update):
            raise TypeError(
                f"optimizer: got {optimizer!r}; allowed: one of embforge.optim, as ef.optim.Adam(lr=1e-3), or None: "
                "then give module.parameters() to a torch.optim optimizer that takes sparse gradients"
            )
        if accumulate and optimizer is None:
            raise ValueError("accumulate=True needs a fused optimizer; without one torch accumulates gradients itself")
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.numbers: Numbers | None = None
        if optimizer is not None:
            self.numbers = Numbers(optimizer.update.rule, optimizer.lr, optimizer.hyper_values, device)
        self._scaler: Any = None
        self._pending: list[pending.Reduced] = []
        self._version = 0  # of the counters, when the last forward outside of a backward pass ran
        self._versions: dict[int, int] = {}  # the same, by where the ids of a forward lay

    @property
    def update(self) -> Update | None:
        """What happens to a row, if the module does it itself."""
        return None if self.optimizer is None else self.optimizer.update

    def programs(
        self,
        spec: CollectionSpec,
        target: str,
        arch: str,
        id_dtype: str,
        params: Params,
        backward: Params | None,
        kernels: str | None,
    ) -> Programs:
        """The texts of all kernels that the module may run on such ids."""

        plans = training_plans(spec, target, arch, id_dtype, params, backward, self.update, self.accumulate)
        texts = {name: Program(plan, kernels).text for name, plan in plans.items()}
        return Programs(**{name: texts.get(name, "") for name in Programs._fields})

    def facade(self, module: Any) -> FusedOptimizer | None:
        """The module's optimizer as torch knows such things."""
        if self.numbers is None:
            return None
        return FusedOptimizer(module, self.numbers, tensor_lr=isinstance(self.optimizer.lr, Tensor))

    def note_forward(self, values: Tensor) -> None:
        """Every forward tells. Raises for one that is repeated after rows have changed."""
        if self.numbers is None:
            return
        version, place = self.numbers.counters._version, values.data_ptr()
        if _in_backward() == -1:
            if len(self._versions) >= REMEMBERED:
                self._versions.clear()
            self._version = self._versions[place] = version
        elif version != self._versions.get(place, self._version):
            raise RuntimeError(RECOMPUTED)

    def lookup(
        self, programs: Programs, storage: Storage, batch: Batch, sequence_elements: int, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """A lookup that autograd records."""
        self.note_forward(batch.values)
        self.take_scale()
        sink = self._take if self.accumulate else None
        call = Call(programs, storage, sequence_elements, self.numbers, parameters, sink)
        trains = self.numbers is not None and any(storage.trainable)
        anchor = self.numbers.anchor if trains and self.numbers is not None else None
        found: Any = Lookup.apply(call, batch.values, batch.offsets, batch.batch, batch.weights, anchor, *parameters)  # type: ignore[no-untyped-call]
        return found if isinstance(found, tuple) else (found, None)

    def step(self, programs: Programs, storage: Storage) -> None:
        """One update from all gradients since the last; nothing if there are none."""
        if self.numbers is None or not self._pending:
            return
        batch, gradients = pending.as_batch(self._pending, storage.tables[0].device)
        with self.numbers.lock:
            run_update(programs.step, storage, batch, gradients, self.numbers.hyper, self.numbers.counters)
        self._pending = []

    def clip(self, programs: Programs, storage: Storage, max_norm: float) -> Tensor:
        """Scales what has accumulated down to a norm over all tables; returns the norm before."""
        if not self.accumulate:
            raise RuntimeError(
                "clip_grad_norm_ needs accumulate=True: without it rows are updated before all gradients are known; "
                "for clipping row by row give the optimizer max_row_norm"
            )
        if not self._pending:
            return torch.zeros((), device=storage.tables[0].device)
        batch, gradients = pending.as_batch(self._pending, storage.tables[0].device)
        reduced = run_reduce(programs.merge, storage, batch, gradients)
        scale = self.numbers.get("grad_scale") if self.numbers is not None else 0.0
        norm = pending.norm_of(reduced) / (scale or 1.0)
        self._pending = [pending.clipped(reduced, norm, max_norm)]
        return norm

    def drop_gradients(self) -> None:
        """Forgets what has accumulated."""
        self._pending = []

    @property
    def has_scaler(self) -> bool:
        """Whether the module knows what losses are multiplied by."""
        return self._scaler is not None

    def use_scaler(self, scaler: Any) -> None:
        """Divides gradients by the scale of a torch.amp.GradScaler, read before every forward."""
        self._scaler = scaler
        if self.numbers is None:
            return
        if scaler is None or not scaler.is_enabled():
            self.numbers.set("grad_scale", 0.0)
        elif scaler._scale is None:  # it makes its scale when it is first used
            device = self.numbers.hyper.device
            scaler.scale(torch.zeros((), device="cpu" if device.type == "meta" else device))

    def take_scale(self) -> None:
        """The scaler's scale as the coming backward will find the loss multiplied by it."""
        scale = getattr(
            self._scaler, "_scale", None
        )  # the tensor itself: asking for its value would wait for the device
        if scale is not None and self.numbers is not None:  # None: there is no scaler, or it is off
            self.numbers.set("grad_scale", scale)

    def move(self, device: torch.device) -> None:
        """Numbers and waiting gradients to another device."""
        if self.numbers is not None and self.numbers.hyper.device != device:
            self.numbers.move(device)
            self._pending = [[(rows.to(device), given.to(device)) for rows, given in one] for one in self._pending]

    def restart(self) -> None:
        """As before the first update."""
        self._pending = []
        if self.numbers is not None and not self.numbers.counters.is_meta:
            self.numbers.counters[STEP] = 0

    def seed(self, seed: int) -> None:
        """The key of stochastic rounding."""
        if self.numbers is not None and not self.numbers.counters.is_meta:
            self.numbers.counters[SEED] = seed

    def counters(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside rows and states."""
        if self.numbers is None:
            return {}
        return {"optim.step": self.numbers.counters[STEP], "optim.seed": self.numbers.counters[SEED]}

    def _take(self, storage: Storage, reduced: pending.Reduced) -> None:
        self._pending.append(reduced)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scaler": None, "_pending": [], "_versions": {}}
