"""How a module's tables are trained: by a fused optimizer in the backward pass or in `step()`, or by torch's own."""

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
from embforge.inputs import Batch, resolved
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program
from embforge.torch_internals import scale_of
from embforge.training import pending
from embforge.training.around import refuse_replicas
from embforge.training.autograd import Call, Holder, Lookup
from embforge.training.calls import Programs, Storage, run_reduce, run_update
from embforge.training.facade import FusedOptimizer, Steps
from embforge.training.group import NOT_FOR_USERS
from embforge.training.numbers import SEED, STEP, Numbers
from embforge.training.rule_groups import RuleGroups

SEEDS = 2**63
"""Seeds are smaller."""


class Trainer:
    """The training of one module. `groups`: its optimizers by table, or None for torch's sparse gradients."""

    def __init__(self, groups: RuleGroups | None, accumulate: bool, device: torch.device) -> None:
        if accumulate and groups is None:
            raise ValueError("accumulate=True needs a fused optimizer; without one torch accumulates gradients itself")
        self.groups = groups
        self.accumulate = accumulate
        self.numbers: Numbers | None = None
        if groups is not None:
            self.numbers = Numbers([group.optimizer for group in groups.groups], device)
        self.scaler: GradScaler | None = None
        """What multiplies losses, if the module was told."""
        self.waiting: list[pending.Pass] = []
        """Gradients that wait for `step`, one entry per backward pass."""

    def plans(
        self, spec: CollectionSpec, target: str, arch: str, id_dtype: str, params: Params, backward: Params | None
    ) -> dict[str, Plan]:
        """The plans of all kernels that the module may run on such ids, by what they are for."""
        if self.groups is None:
            return training_plans(spec, target, arch, id_dtype, params, backward)
        return self.groups.plans(spec, target, arch, id_dtype, params, backward, self.accumulate)

    def programs(self, plans: dict[str, Plan], kernels: str | None) -> Programs:
        """The texts of these kernels."""
        if self.groups is None:
            texts = {name: Program(plan, kernels).text for name, plan in plans.items()}
        else:
            texts = self.groups.texts(plans, kernels)
        return Programs(**{name: texts.get(name, "") for name in Programs._fields})

    def __str__(self) -> str:
        if self.numbers is None or self.groups is None:
            return "None"
        found = {group.name: self._described(place) for place, group in enumerate(self.groups.groups)}
        named = ", ".join(f"{name}: {text}" for name, text in found.items())
        return found.get("") or f"{{{named}}}"

    def _described(self, place: int) -> str:
        assert self.numbers is not None and self.groups is not None
        names = [name for name in self.numbers.names(place) if name not in NOT_FOR_USERS]
        numbers = [f"{name}={self.numbers.get(name, place):g}" for name in names]
        update = self.groups.groups[place].optimizer.update
        return f"{update.rule.name}({', '.join(numbers)}, rounding={update.rounding!r})"

    def facade(self, module: Steps) -> FusedOptimizer | None:
        """The module's optimizer as torch knows such things."""
        if self.numbers is None or self.groups is None:
            return None
        return FusedOptimizer(module, self.numbers, self.groups)

    def note_forward(self) -> None:
        """Every forward tells. Raises for one that is repeated after rows have changed."""
        if self.numbers is not None:
            self.numbers.note_forward()

    def lookup(
        self,
        programs: Programs,
        storage: Storage,
        holders: Sequence[Holder],
        batch: Batch,
        sequence_elements: int,
        parameters: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """A lookup that autograd records."""
        self.note_forward()
        batch = resolved(batch)
        sink = self.take if self.accumulate else None
        call = Call(programs, storage, holders, sequence_elements, self.numbers, parameters, sink)
        trains = self.numbers is not None and any(storage.trainable)
        anchor = self.numbers.anchor if trains and self.numbers is not None else None
        if trains:
            refuse_replicas()
        given = (call, batch.values, batch.offsets, batch.batch, batch.weights, anchor)
        found = all_applied(Lookup, *given, *parameters)
        return found[0], found[1] if len(found) > 1 else None

    def step(self, programs: Programs, storage: Storage) -> None:
        """One update from all gradients since the last; nothing if there are none."""
        if self.numbers is None:
            return
        with self.numbers.lock:
            if self.waiting and not (self.scales and pending.spoilt(self.waiting)):
                batch, gradients = pending.as_batch(self.waiting, storage.tables[0].device)
                hyper, counters = self.numbers.hyper, self.numbers.counters
                run_update(programs.step, storage, batch, gradients, hyper, counters, programs)
            self.waiting = []

    def clip(self, programs: Programs, storage: Storage, max_norm: float) -> Tensor:
        """Scales what has accumulated down to a norm over all tables; returns the norm before."""
        if self.numbers is None:
            raise RuntimeError(
                "clip_grad_norm_ of the module is for a fused optimizer: give it one of embforge.optim and "
                "accumulate=True; or make the module with sparse=False and call torch.nn.utils.clip_grad_norm_, which "
                "takes dense gradients only"
            )
        if not self.accumulate:
            raise RuntimeError(
                "clip_grad_norm_ needs accumulate=True: without it rows are updated before all gradients are known; "
                "for clipping row by row give the optimizer max_row_norm"
            )
        with self.numbers.lock:
            if not self.waiting:
                return torch.zeros((), dtype=torch.float32, device=storage.tables[0].device)
            merged = self._merged(programs, storage)
            norm = pending.norm_of(merged.reduced) / (self.numbers.get("grad_scale") or 1.0)
            self.waiting = [pending.Pass(pending.clipped(merged.reduced, norm, max_norm), merged.verdicts)]
        return norm

    def merge(self, programs: Programs, storage: Storage) -> pending.Reduced:
        """Makes one pass of all that wait: each table's rows that occur, and the sums of their gradients."""
        self.waiting = [self._merged(programs, storage)]
        return self.waiting[0].reduced

    def _merged(self, programs: Programs, storage: Storage) -> pending.Pass:
        if not self.waiting:
            return pending.nothing(storage.tables)
        batch, gradients = pending.as_batch(self.waiting, storage.tables[0].device)
        reduced = run_reduce(programs.merge, storage, batch, gradients, programs)
        return pending.Pass(reduced, [verdict for one in self.waiting for verdict in one.verdicts])

    def drop_gradients(self) -> None:
        """Forgets what has accumulated."""
        if self.numbers is not None:
            with self.numbers.lock:
                self.waiting = []

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, so that gradients may be infinite."""
        return self.scaler is not None and self.scaler.is_enabled()

    def use_scaler(self, scaler: GradScaler | None) -> None:
        """Divides gradients by the scale of a torch.amp.GradScaler, read in every backward."""
        if self.numbers is None:
            raise ValueError(
                "use_grad_scaler is for a fused optimizer; without one GradScaler works as with any module"
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"use_grad_scaler: got {scaler!r}; allowed: a torch.amp.GradScaler, or None")
        self.scaler = scaler
        self.numbers.clear_verdict()
        self.numbers.scale = None
        if scaler is None or not scaler.is_enabled():
            self.numbers.set_grad_scale(0.0)
            return
        if scale_of(scaler) is None:  # it makes its scale when it is first used
            device = self.numbers.hyper.device
            place = "cpu" if device.type == "meta" else device
            scaler.scale(torch.zeros((), dtype=torch.float32, device=place))
        self.numbers.scale = scale = scale_of(scaler)
        assert scale is not None
        self.numbers.set_grad_scale(scale)

    def move(self, device: torch.device) -> None:
        """Numbers and waiting gradients to another device."""
        if self.numbers is not None and self.numbers.hyper.device != device:
            self.numbers.move(device)
            self.waiting = [one.to(device) for one in self.waiting]

    def restart(self) -> None:
        """As before the first update."""
        self.drop_gradients()
        if self.numbers is not None and not self.numbers.counters.is_meta:
            self.numbers.counters[STEP] = 0

    def seed(self, seed: int) -> None:
        """The key of stochastic rounding."""
        if self.numbers is None:
            raise RuntimeError("seed() is for a fused optimizer, whose rounding it makes reproducible; there is none")
        key = index(seed) if hasattr(seed, "__index__") else -1
        if not 0 <= key < SEEDS:
            raise ValueError(f"seed={seed!r} is not allowed; a whole number, 0 <= seed < 2^63")
        self.numbers.seed(key)

    def counters(self) -> dict[str, Tensor]:
        """What a checkpoint must hold beside rows and states."""
        if self.numbers is None:
            return {}
        return {"optim.step": self.numbers.counters[STEP], "optim.seed": self.numbers.counters[SEED]}

    def take(self, gradients: Gradients, reduced: pending.Reduced) -> Tensor:
        """Lets the gradients of a backward pass wait for `step`. Returns what a loss scaler sees: infinite if they must
        not be used."""
        assert self.numbers is not None
        verdicts = [pending.verdict_of(gradients, reduced)] if self.scales else []
        with self.numbers.lock:
            self.waiting.append(pending.Pass(reduced, verdicts))
        return verdicts[0] if verdicts else torch.zeros(1, dtype=torch.float32, device=gradients.pooled.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "scaler": None, "waiting": []}


def wrong_counter(key: str, given: Any, counter: Tensor) -> str | None:
    """What is wrong with an entry of a state dict that stands for a counter, or None."""
    if not isinstance(given, Tensor):
        wrong = repr(given)
    elif given.shape != counter.shape:
        wrong = f"shape {tuple(given.shape)}"
    elif given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        wrong = str(given.dtype)
    elif not given.is_meta and int(given) < 0:
        wrong = str(int(given))
    else:
        return None
    return f"{key}: {wrong} is not allowed; allowed: a tensor of one whole number, at least 0"
