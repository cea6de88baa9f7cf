"""The owners' side: lookups in this rank's own rows for the samples of all ranks, and their updates."""

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


class OwnOptions(TypedDict):
    """What all collections of a rank are made with."""

    device: torch.device
    backend: BackendName
    kernels: str | None
    batch_size: int | None
    bounds_check: BoundsCheck


class Owner:
    """One rank's own collection. `forward`, `backward`: dtypes in which its results and their gradients are
    computed."""

    def __init__(
        self,
        local: Local,
        forward: OutputDtype,
        backward: OutputDtype,
        optimizer: RuleGroups,
        accumulate: bool,
        options: OwnOptions,
    ) -> None:
        self.local = local
        spec = replace(local.spec, output_dtype=forward)
        self.module = EmbeddingCollection(spec, optimizer=optimizer, accumulate=accumulate, **options)
        self._backward_dtype = backward
        self._programs: Programs | None = None
        self._made_for: tuple[torch.dtype, torch.device, str] | None = None

    def load(self, ids: torch.dtype, trains: bool) -> None:
        """Builds and loads the kernels of calls with such ids. Raises what `kernel_of` raises."""
        found, accumulate = self.programs(ids), self.module.trainer.accumulate
        behind = (found.reduce, found.step) if accumulate else (found.backward,)
        needed = (found.train, *behind) if trains else (found.forward,)
        for program in needed:
            kernel_of(program, needed)

    def programs(self, ids: torch.dtype) -> Programs:
        """The module's own; those behind a backward for gradients as they travel."""
        module = self.module
        made_for = (ids, module.device, module.backend)
        if self._made_for != made_for:
            name = "int32" if ids == torch.int32 else "int64"
            chosen = module.chosen[name]
            spec = replace(self.local.spec, output_dtype=self._backward_dtype)
            trainer = module.trainer
            plans = trainer.plans(
                spec, module.backend, arch_of(module.backend, module.device), name, chosen["forward"].params,
                chosen["backward"].params,
            )  # fmt: skip
            behind, own = trainer.programs(plans, module.kernels), module.programs[ids]
            self._programs = own._replace(
                backward=behind.backward, reduce=behind.reduce, weight_gradient=behind.weight_gradient
            )
            self._made_for = made_for
        assert self._programs is not None
        return self._programs

    def forward(self, batch: Batch, keep: bool) -> ForwardResults:
        """Results for the samples of all ranks. `keep`: a backward will come."""
        programs = self.programs(batch.values.dtype)
        assert batch.rows_per_feature is not None
        rows = [batch.rows_per_feature[f.index] for f in self.local.layout.sequence_features]
        elements = sequence_elements(self.local.layout, rows) if rows else 0
        program = programs.train if keep else programs.forward
        return run_forward_kernel(program, self.module.table_memory(), batch, elements)

    def update(self, batch: Batch, gradients: Gradients) -> None:
        """Rows and states at once; or, if gradients accumulate, what `step` will use."""
        trainer, numbers = self.module.trainer, self.module.trainer.numbers
        assert numbers is not None
        # Also if all tables here are frozen: the step counts, as on ranks that hold others.
        storage, programs = self.module.table_memory(), self.programs(batch.values.dtype)
        if trainer.accumulate:
            trainer.take(gradients, run_reduce_kernel(programs.reduce, storage, batch, gradients))
            return
        with numbers.lock:
            run_update_kernel(programs.backward, storage, batch, gradients, numbers.hyper, numbers.counters)

    def weight_gradient(self, batch: Batch, gradients: Gradients) -> Tensor:
        """Of the weights that came with ids."""
        program = self.programs(batch.values.dtype).weight_gradient
        return run_weight_gradient_kernel(program, self.module.table_memory(), batch, gradients)

    def merge(self) -> Reduced:
        """Of each table the rows whose gradients wait for a step, and the sums of these."""
        return self.module.trainer.merge(self.module.programs[torch.int64], self.module.table_memory())
