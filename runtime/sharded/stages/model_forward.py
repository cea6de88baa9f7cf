"""The work of the owners of rows: lookups in the rows of this rank for the samples of all ranks, and their updates."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from embforge.backends import BackendName, arch_of
from embforge.codegen.dtypes import OutputDtype
from embforge.codegen.sharding.geometry import Local
from embforge.collection import EmbeddingCollection
from embforge.inputs import Batch, BoundsCheck
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import kernel_of
from embforge.operator_arguments import sequence_elements
from embforge.training.calls import (
    ForwardResults,
    Programs,
    run_forward_kernel,
    run_reduce_kernel,
    run_update_kernel,
    run_weight_gradient_kernel,
)
from embforge.training.pending import Reduced
from embforge.training.rule_groups import RuleGroups


class CollectionOptions(TypedDict):
    """The arguments that all collections of a rank have in common."""

    device: torch.device
    backend: BackendName
    kernels: str | None
    batch_size: int | None
    bounds_check: BoundsCheck


class Owner:
    """The collection of the rows that this rank holds. `forward` and `backward` are the dtypes of its results and of
    their gradients."""

    def __init__(
        self,
        local: Local,
        forward: OutputDtype,
        backward: OutputDtype,
        optimizer: RuleGroups,
        accumulate: bool,
        options: CollectionOptions,
    ) -> None:
        self.local = local
        spec = replace(local.spec, output_dtype=forward)
        self.module = EmbeddingCollection(spec, optimizer=optimizer, accumulate=accumulate, **options)
        self._backward_dtype = backward
        self._programs: Programs | None = None
        self._programs_key: tuple[torch.dtype, torch.device, str] | None = None

    def load(self, ids: torch.dtype, trains: bool) -> None:
        """Builds and loads the kernels of calls with ids of this dtype. Raises what `kernel_of` raises."""
        programs, accumulate = self.programs(ids), self.module.trainer.accumulate
        backward = (programs.reduce, programs.step) if accumulate else (programs.backward,)
        needed = (programs.train, *backward) if trains else (programs.forward,)
        for program in needed:
            kernel_of(program, needed)

    def programs(self, ids: torch.dtype) -> Programs:
        """The programs of the module. Those of its backward take gradients in the dtype in which they are received."""
        module = self.module
        key = (ids, module.device, module.backend)
        if self._programs_key != key:
            name = "int32" if ids == torch.int32 else "int64"
            chosen = module.chosen[name]
            spec = replace(self.local.spec, output_dtype=self._backward_dtype)
            trainer = module.trainer
            plans = trainer.plans(
                spec, module.backend, arch_of(module.backend, module.device), name, chosen["forward"].params,
                chosen["backward"].params,
            )  # fmt: skip
            backward, own = trainer.programs(plans, module.kernels), module.programs[ids]
            self._programs = own._replace(
                backward=backward.backward, reduce=backward.reduce, weight_gradient=backward.weight_gradient
            )
            self._programs_key = key
        assert self._programs is not None
        return self._programs

    def forward(self, batch: Batch, keep: bool) -> ForwardResults:
        """Looks up the samples of all ranks. `keep` says whether the results are kept for a backward."""
        programs = self.programs(batch.values.dtype)
        assert batch.rows_per_feature is not None
        rows = [batch.rows_per_feature[f.index] for f in self.local.layout.sequence_features]
        elements = sequence_elements(self.local.layout, rows) if rows else 0
        program = programs.train if keep else programs.forward
        return run_forward_kernel(program, self.module.table_memory(), batch, elements)

    def update(self, batch: Batch, gradients: Gradients) -> None:
        """Updates rows and states, or, if gradients accumulate, keeps the gradients for `step`."""
        trainer, numbers = self.module.trainer, self.module.trainer.numbers
        assert numbers is not None
        # Also if all tables of this rank are frozen: the step must be counted, as on ranks that hold other tables.
        memory, programs = self.module.table_memory(), self.programs(batch.values.dtype)
        if trainer.accumulate:
            trainer.take(gradients, run_reduce_kernel(programs.reduce, memory, batch, gradients))
            return
        with numbers.lock:
            run_update_kernel(programs.backward, memory, batch, gradients, numbers.hyper, numbers.counters)

    def weight_gradient(self, batch: Batch, gradients: Gradients) -> Tensor:
        """The gradients of the weights that were received with ids."""
        program = self.programs(batch.values.dtype).weight_gradient
        return run_weight_gradient_kernel(program, self.module.table_memory(), batch, gradients)

    def merge(self) -> Reduced:
        """For each table, the rows whose gradients wait for a step, and the sums of these gradients."""
        return self.module.trainer.merge(self.module.programs[torch.int64], self.module.table_memory())
