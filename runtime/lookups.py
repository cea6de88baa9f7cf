"""Who executes a lookup whose input was checked: a kernel at once, autograd, or a torch operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.inputs import Batch, with_negation_applied
from embforge.launch.kernels import Kernel, kernel_of
from embforge.launch.metadata import Metadata, addresses_of, check_tables, metadata_of
from embforge.operator_arguments import sequence_elements
from embforge.operators import dense as dense_ops
from embforge.operators import lookup as ops
from embforge.operators.dispatch import has_numbers, leaves_process, must_dispatch
from embforge.torch_internals import graph_break, is_exporting
from embforge.training.calls import Programs
from embforge.training.trainable_collection import TrainableCollection

SPARSE = (
    "torch.compile cannot hold sparse gradients in a graph: make the EmbeddingCollection with sparse=False (dense "
    "gradients) or with an optimizer of embforge.optim, or compile without fullgraph=True"
)
ACCUMULATED = (
    "gradients that accumulate until step() cannot be part of a graph: make the EmbeddingCollection without "
    "accumulate=True, or compile without fullgraph=True"
)
"""Reasons why a compiled graph cannot contain a call."""

# Named once for speed: every dot in the path to a function is an attribute access, and small lookups take microseconds.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


class Ready(NamedTuple):
    """A kernel's call with the metadata of the tables, which is valid until a table moves."""

    addresses: list[int]
    """The addresses and sizes of the tables when the metadata was made."""
    call: Callable[[Metadata, Sequence[Tensor], Batch, int, str], tuple[Tensor, Tensor | None]]
    metadata: Metadata


class Lookups(TrainableCollection):
    """The lookups of a collection in this process. A class that derives from it makes the tables and programs, and
    checks the input."""

    _exported: dict[torch.dtype, str]
    """The texts that exported graphs name instead of programs, by id dtype: they name no machine."""
    _ready: dict[torch.dtype, Ready]
    """The kernel calls that are ready for the present tables, by id dtype."""

    def lookup(self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The part of every call after the check of its input. Returns the pooled results, and the flat rows of `none`
        features."""
        values = batch[0]
        if _is_grad_enabled() and self._want_gradients(tables, batch[2]):
            return self._lookup_to_train(tables, batch, sequence_rows)
        if must_dispatch(values):
            return self._call_operator(tables, batch, sequence_rows)
        if self._fused:
            self.trainer.note_forward()
        # Plain eager calls skip the dispatcher, which would cost as much as a small lookup.
        batch = with_negation_applied(batch)
        ready = self._ready.get(values.dtype)
        if ready is None or ready[0] != addresses_of(tables):
            if values.is_meta:  # the operator's fake implementation computes the shapes
                return self._call_operator(tables, batch, sequence_rows)
            ready = self._make_ready(tables, batch)
        elements = sequence_elements(self.layout, sequence_rows) if sequence_rows else 0
        return ready[1](ready[2], tables, batch, elements, self._bounds_check)

    def _lookup_to_train(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """A lookup that autograd records."""
        trainer, programs = self.trainer, self._program(batch)
        if self._is_fsdp_managed_module and self._fused:
            self.refuse_fsdp()
        elements = sequence_elements(self.layout, sequence_rows) if sequence_rows else 0
        parameters, table_objects = () if self._fused else tables, list(self.named_tables().values())
        if not must_dispatch(batch.values) and not batch.values.is_meta:
            return trainer.lookup(programs, self._table_memory(tables), table_objects, batch, elements, parameters)
        if is_exporting():  # an exported graph only serves, and needs no optimizer states
            return self._call_operator(tables, batch, sequence_rows)
        memory, numbers = self._new_table_memory(tables), trainer.numbers
        if numbers is None and not any(
            table.sparse and trained for table, trained in zip(table_objects, memory.trainable, strict=True)
        ):
            return self._call_dense_operator(tables, batch, sequence_rows)
        if numbers is None or trainer.accumulate:
            # Sparse and accumulated gradients cannot be part of a graph: a compiler leaves these calls to Python.
            if _is_compiling() or has_numbers(batch.values):
                untraced = _untraced(trainer.lookup, SPARSE if numbers is None else ACCUMULATED)
                result: tuple[Tensor, Tensor | None] = untraced(
                    programs, memory, table_objects, batch, elements, parameters
                )
                return result
            return self._call_operator(tables, batch, sequence_rows)
        anchor = numbers.anchor if any(memory.trainable) else numbers.anchor.detach()
        results: tuple[Tensor, ...] = ops.lookup_train(
            batch.values,
            batch.offsets,
            batch.weights,
            self._blocks(),
            memory.states,
            anchor,
            numbers.hyper,
            numbers.counters,
            list(sequence_rows),
            programs.train,
            programs.backward,
            programs.weight_gradient,
            self._bounds_check,
            memory.trainable,
        )
        return results[0], results[1]

    def _make_ready(self, tables: list[Tensor], batch: Batch) -> Ready:
        check_tables(self.layout, tables)
        programs = self._program(batch)
        kernel: Kernel = kernel_of(programs.forward, programs if self._fused else ())
        metadata = metadata_of(tables, self._bounds_check)
        ready = Ready(addresses_of(tables), kernel.__call__, metadata)
        self._ready[batch.values.dtype] = ready
        return ready

    def _call_operator(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        rows = list(sequence_rows) or None
        program = self._exported[batch.values.dtype] if leaves_process() else self._program(batch).forward
        result: tuple[Tensor, Tensor] = ops.lookup(
            batch.values, batch.offsets, batch.weights, tables, rows, program, self._bounds_check
        )
        return result

    def _call_dense_operator(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        programs, rows = self._program(batch), list(sequence_rows) or None
        texts = (programs.train, programs.reduce, programs.weight_gradient)
        results: tuple[Tensor, ...] = dense_ops.lookup_dense(
            batch.values, batch.offsets, batch.weights, tables, rows, *texts, self._bounds_check
        )
        return results[0], results[1]

    def _program(self, batch: Batch) -> Programs:
        return self.programs[batch.values.dtype]

    def sequence_rows(self, batch: Batch) -> tuple[int, ...]:
        """The number of ids of each `none` feature. It is read from the device only if the caller did not pass it and
        there are several features."""
        wanted = [f.index for f in self.layout.sequence_features]
        if not wanted:
            return ()
        if batch.rows_per_feature is not None:
            return tuple(batch.rows_per_feature[i] for i in wanted)
        if len(self.layout.features) == 1:
            return (batch.values.numel(),)
        if batch.batch == 0:
            return (0,) * len(wanted)
        borders = batch.offsets[:: batch.batch].tolist()
        # Limited to the number of ids: the kernel refuses wrong offsets, but only after results have been allocated.
        return tuple(max(0, min(borders[i + 1] - borders[i], batch.values.numel())) for i in wanted)

    def sequence_sizes(self, rows: Sequence[int]) -> list[int]:
        return [count * f.dim for count, f in zip(rows, self.layout.sequence_features, strict=True)]


def _untraced(function: Any, reason: str) -> Any:
    """The function, excluded from compiled graphs. If that is not allowed (fullgraph=True), torch's error says why."""
    if _is_compiling():
        graph_break(reason)
    return torch.compiler.disable(function)
