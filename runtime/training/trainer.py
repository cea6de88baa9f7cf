"""How a module's tables are trained: by a fused optimizer in the backward pass or in `step()`, or by torch.optim."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from embforge.autograd_calls import all_applied
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.codegen.plans import training_plans
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch, with_negation_applied
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program
from embforge.torch_internals import scale_of
from embforge.training import pending
from embforge.training.autograd import Call, Lookup, TrainableTable
from embforge.training.calls import Programs, TableMemory, run_reduce_kernel, run_update_kernel
from embforge.training.enclosing_model import refuse_replicas
from embforge.training.fused_optimizer import FusedOptimizer, OptimizedModule
from embforge.training.numbers import SEED, STEP, Numbers
from embforge.training.param_groups import INTERNAL_NUMBERS
from embforge.training.rule_groups import RuleGroups

SEEDS = 2**63
"""Seeds must be smaller than this number."""


class Trainer:
    """The training of one module. `groups`: its fused optimizers; None if its tables are parameters for torch.optim."""

    def __init__(self, groups: RuleGroups | None, accumulate: bool, device: torch.device) -> None:
        if accumulate and groups is None:
            raise ValueError("accumulate=True needs a fused optimizer; without one torch accumulates gradients itself")
        self.groups = groups
        self.accumulate = accumulate
        self.numbers: Numbers | None = None
        if groups is not None:
            self.numbers = Numbers([group.optimizer for group in groups.groups], device)
        self.scaler: GradScaler | None = None
        """The GradScaler that multiplies losses, if the user has set it."""
        self.waiting: list[pending.Pass] = []
        """Accumulated gradients, one entry per backward pass."""

    def plans(
        self, spec: CollectionSpec, target: str, arch: str, id_dtype: str, params: Params, backward: Params | None
    ) -> dict[str, Plan]:
        """The plans of all kernels that the module may run on ids of this dtype, by the names in `Programs`."""
        if self.groups is None:
            return training_plans(spec, target, arch, id_dtype, params, backward)
        return self.groups.plans(spec, target, arch, id_dtype, params, backward, self.accumulate)

    def programs(self, plans: dict[str, Plan], kernels: str | None) -> Programs:
        """The programs of these kernel plans. `kernels`: the directory with kernels that `embforge gen` wrote, or
        None."""
        if self.groups is None:
            texts = {name: Program(plan, kernels).text for name, plan in plans.items()}
        else:
            texts = self.groups.texts(plans, kernels)
        return Programs(**{name: texts.get(name, "") for name in Programs._fields})

    def __str__(self) -> str:
        if self.numbers is None or self.groups is None:
            return "None"
        texts = {group.name: self._described(place) for place, group in enumerate(self.groups.groups)}
        named = ", ".join(f"{name}: {text}" for name, text in texts.items())
        return texts.get("") or f"{{{named}}}"

    def _described(self, place: int) -> str:
        assert self.numbers is not None and self.groups is not None
        names = [name for name in self.numbers.names(place) if name not in INTERNAL_NUMBERS]
        numbers = [f"{name}={self.numbers.get(name, place):g}" for name in names]
        update = self.groups.groups[place].optimizer.update
        return f"{update.rule.name}({', '.join(numbers)}, rounding={update.rounding!r})"

    def facade(self, module: OptimizedModule) -> FusedOptimizer | None:
        """The fused optimizers of the module as one torch optimizer; None without a fused optimizer."""
        if self.numbers is None or self.groups is None:
            return None
        return FusedOptimizer(module, self.numbers, self.groups)

    def note_forward(self) -> None:
        """Called at the start of every forward. RuntimeError if a backward pass repeats it after rows have changed."""
        if self.numbers is not None:
            self.numbers.note_forward()

    def lookup(
        self,
        programs: Programs,
        memory: TableMemory,
        table_objects: Sequence[TrainableTable],
        batch: Batch,
        sequence_elements: int,
        parameters: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Looks up a batch so that autograd records it: the pooled results, and the flat rows of `none` features."""
        self.note_forward()
        batch = with_negation_applied(batch)
        sink = self.take if self.accumulate else None
        call = Call(programs, memory, table_objects, sequence_elements, self.numbers, parameters, sink)
        trains = self.numbers is not None and any(memory.trainable)
        anchor = self.numbers.anchor if trains and self.numbers is not None else None
        if trains:
            refuse_replicas()
        inputs = (call, batch.values, batch.offsets, batch.batch, batch.weights, anchor)
        results = all_applied(Lookup, *inputs, *parameters)
        return results[0], results[1] if len(results) > 1 else None

    def step(self, programs: Programs, memory: TableMemory) -> None:
        """Updates rows once from all accumulated gradients. Does nothing if there are none."""
        if self.numbers is None:
            return
        with self.numbers.lock:
            if self.waiting and not (self.scales and pending.any_not_finite(self.waiting)):
                batch, gradients = pending.as_batch(self.waiting, memory.tables[0].device)
                hyper, counters = self.numbers.hyper, self.numbers.counters
                run_update_kernel(programs.step, memory, batch, gradients, hyper, counters, programs)
            self.waiting = []

    def clip(self, programs: Programs, memory: TableMemory, max_norm: float) -> Tensor:
        """Scales accumulated gradients down to a norm over all tables, and returns their norm before scaling."""
        if self.numbers is None:
            raise RuntimeError(
                "clip_grad_norm_ of the module is for a fused optimizer: make the module with an optimizer of "
                "embforge.optim and accumulate=True; or make it with sparse=False and call "
                "torch.nn.utils.clip_grad_norm_, which takes only dense gradients"
            )
        if not self.accumulate:
            raise RuntimeError(
                "clip_grad_norm_ needs accumulate=True: without it rows are updated before all gradients are known; "
                "to clip row by row, set max_row_norm of the optimizer"
            )
        with self.numbers.lock:
            if not self.waiting:
                return torch.zeros((), dtype=torch.float32, device=memory.tables[0].device)
            merged = self._merged(programs, memory)
            norm = pending.norm_of(merged.reduced) / (self.numbers.get("grad_scale") or 1.0)
            self.waiting = [pending.Pass(pending.clipped(merged.reduced, norm, max_norm), merged.verdicts)]
        return norm

    def merge(self, programs: Programs, memory: TableMemory) -> pending.Reduced:
        """Merges all accumulated gradients into one pass, and returns each table's rows and the sums of their
        gradients."""
        self.waiting = [self._merged(programs, memory)]
        return self.waiting[0].reduced

    def _merged(self, programs: Programs, memory: TableMemory) -> pending.Pass:
        if not self.waiting:
            return pending.nothing(memory.tables)
        batch, gradients = pending.as_batch(self.waiting, memory.tables[0].device)
        reduced = run_reduce_kernel(programs.merge, memory, batch, gradients, programs)
        return pending.Pass(reduced, [verdict for each in self.waiting for verdict in each.verdicts])

    def drop_gradients(self) -> None:
        """Drops accumulated gradients."""
        if self.numbers is not None:
            with self.numbers.lock:
                self.waiting = []

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, so that gradients may be infinite."""
        return self.scaler is not None and self.scaler.is_enabled()

    def use_scaler(self, scaler: GradScaler | None) -> None:
        """Makes updates divide gradients by the scale of a torch.amp.GradScaler, which every backward reads."""
        if self.numbers is None:
            raise ValueError(
                "use_grad_scaler is for a fused optimizer, and this module has none; use GradScaler as with any module"
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"use_grad_scaler: got {scaler!r}; allowed: a torch.amp.GradScaler, or None")
        self.scaler = scaler
        self.numbers.clear_verdict()
        self.numbers.scale = None
        if scaler is None or not scaler.is_enabled():
            self.numbers.set_grad_scale(0.0)
            return
        if scale_of(scaler) is None:  # a scaler makes its scale when it is first used
            device = self.numbers.hyper.device
            scale_device = "cpu" if device.type == "meta" else device
            scaler.scale(torch.zeros((), dtype=torch.float32, device=scale_device))
        self.numbers.scale = scale = scale_of(scaler)
        assert scale is not None
        self.numbers.set_grad_scale(scale)

    def move(self, device: torch.device) -> None:
        """Moves hyperparameters, counters and accumulated gradients to another device."""
        if self.numbers is not None and self.numbers.hyper.device != device:
            self.numbers.move(device)
            self.waiting = [each.to(device) for each in self.waiting]

    def restart(self) -> None:
        """Drops accumulated gradients and sets the step to 0, as before the first update."""
        self.drop_gradients()
        if self.numbers is not None and not self.numbers.counters.is_meta:
            self.numbers.counters[STEP] = 0

    def seed(self, seed: int) -> None:
        """Sets the seed of stochastic rounding."""
        if self.numbers is None:
            raise RuntimeError(
                "seed() is for a fused optimizer, whose rounding it makes reproducible, and this module has none"
            )
        key = index(seed) if hasattr(seed, "__index__") else -1
        if not 0 <= key < SEEDS:
            raise ValueError(f"seed={seed!r} is not allowed; a whole number, 0 <= seed < 2^63")
        self.numbers.seed(key)

    def counters(self) -> dict[str, Tensor]:
        """The step and the seed by their keys in state dicts, which checkpoints hold in addition to rows and states."""
        if self.numbers is None:
            return {}
        return {"optim.step": self.numbers.counters[STEP], "optim.seed": self.numbers.counters[SEED]}

    def take(self, gradients: Gradients, reduced: pending.Reduced) -> Tensor:
        """Keeps the gradients of a backward pass until `step`.

        Returns the verdict that a loss scaler reads: infinity if the gradients must not be used, or 0.
        """
        verdicts = [pending.verdict_of(gradients, reduced)] if self.scales else []
        self.keep(pending.Pass(reduced, verdicts))
        return verdicts[0] if verdicts else torch.zeros(1, dtype=torch.float32, device=gradients.pooled.device)

    def keep(self, gradients: pending.Pass) -> None:
        """Keeps gradients until `step`, which may run in another thread."""
        assert self.numbers is not None
        with self.numbers.lock:
            self.waiting.append(gradients)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "scaler": None, "waiting": []}


def wrong_counter(key: str, loaded: Any, counter: Tensor) -> str | None:
    """An error message if an entry of a state dict cannot be the value of a counter; None if it can."""
    if not isinstance(loaded, Tensor):
        wrong = repr(loaded)
    elif loaded.shape != counter.shape:
        wrong = f"shape {tuple(loaded.shape)}"
    elif loaded.is_floating_point() or loaded.is_complex() or loaded.dtype == torch.bool:
        wrong = str(loaded.dtype)
    elif not loaded.is_meta and int(loaded) < 0:
        wrong = str(int(loaded))
    else:
        return None
    return f"{key}: {wrong} is not allowed; allowed: a tensor of one whole number, at least 0"
