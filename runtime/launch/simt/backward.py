"""Runs a plan's backward kernels on the CPU by the SIMT executor, and raises the bugs that it finds.

Tables and states up to `MOST_COPIED` bytes are copied to guarded memory, and copied back if the whole call succeeds;
larger ones are updated where they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import UPDATE_METADATA_WORDS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.backward import backward_shape_of
from embforge.codegen.targets.cuda.launch import status_size
from embforge.codegen.targets.cuda.weight_gradient import weights_shape
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.gpu.backward_call import (
    Call,
    Launch,
    backward_call,
    gradient_arguments,
    reduce_call,
    weight_gradient_call,
)
from embforge.launch.gpu.forward_call import Value
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata
from embforge.launch.simt.abi import load_image
from embforge.launch.simt.counters import TABLE
from embforge.launch.simt.forward import MOST_COPIED, MOST_SEEDS
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import Memory, check_kernels, launch_kernel, raise_mistakes
from embforge.launch.update_kernel import UpdateKernel

CPU = torch.device("cpu")


class _SimtKernels:
    """The kernels of a plan in a loaded image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._twin = twin_of(plan)
        self._image = load_image(image)
        self._calls = count()

    def check(self) -> None:
        """Does nothing: mistakes and bugs raise in the call that has them, so no error is ever pending."""

    def _seed(self) -> int:
        """The seed of the next call. Every call has a different schedule, in the same order in every process."""
        return next(self._calls) % MOST_SEEDS

    def _run(self, call: Call, memory: Memory, status: Tensor, batch: Batch, bounds_check: str, seed: int) -> None:
        """Runs all steps of a call, then raises the mistakes that the kernels found in the batch.

        Ids that the kernels do not check are checked first: an id outside of its table may address a row of another
        table, and no check of memory would find that.
        """
        if bounds_check == "unchecked":
            raise_bad_input(self.plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, "error")
        for step in call.steps:
            if isinstance(step, Launch):
                arguments = call.arguments(status, step.level)
                launch_kernel(self.plan, self._image, step.kernel, arguments, memory.regions, seed=seed)
            else:
                step()
        raise_mistakes(self.plan, status, batch, bounds_check)


class SimtBackward(_SimtKernels, UpdateKernel):
    """Updates rows and states."""

    def __init__(self, plan: Plan, image: Path) -> None:
        super().__init__(plan, image)
        self._shape = backward_shape_of(self._twin)
        check_kernels(self._image, plan.op, self._shape.symbols)

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
        seed: int | None = None,
    ) -> Tensor:
        """Updates rows and states under the schedule of a seed. Returns 0, or infinity if a gradient is not finite and
        the loss was scaled.

        Raises what `raise_bad_input` raises, before anything is written, and `KernelBugError` for a bug in a kernel.
        """
        copies = _GuardedTables(self.plan, metadata, tables, states)
        guarded_counters = guarded_copy(counters)
        read = gradient_arguments(copies.metadata, _guarded_batch(batch), _guarded(gradients), bounds_check)
        call = backward_call(self._shape, read, guarded_copy(hyper), guarded_counters, guarded_empty)
        memory = copies.memory()
        status = _describe(call, memory, writable={"counters", "verdict"})
        self._run(call, memory, status, batch, bounds_check, self._seed() if seed is None else seed)
        copies.copy_back()
        counters.copy_(guarded_counters)
        verdict = call.by_name["verdict"]
        assert isinstance(verdict, Tensor)
        return verdict


class SimtReduce(_SimtKernels):
    """Computes the gradient of every row that occurs."""

    def __init__(self, plan: Plan, image: Path) -> None:
        super().__init__(plan, image)
        self._shape = backward_shape_of(self._twin)
        check_kernels(self._image, plan.op, self._shape.symbols)

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        bounds_check: str,
        seed: int | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, for each table, the rows that occur and their gradients. Raises as an update does."""
        words = Metadata(guarded_copy(metadata.words), 0)
        read = gradient_arguments(words, _guarded_batch(batch), _guarded(gradients), bounds_check)
        first = reduce_call(self._shape, len(tables), read, guarded_empty)
        memory = Memory()
        status = _describe(first.call, memory, writable={"counts"})
        seed = self._seed() if seed is None else seed
        self._run(first.call, memory, status, batch, bounds_check, seed)
        call, tensors = first.finish(first.counts.tolist(), self.plan)
        results = {"rows", "gradients"}
        memory.describe({name: call.by_name[name] for name in sorted(results)}, results, ())
        self._run(call, memory, status, batch, bounds_check, seed)
        for name in sorted(results):
            _raise_unwritten(self.plan, memory, call.by_name, name)
        return tensors


class SimtWeightGradient(_SimtKernels):
    """Computes the gradients of per-sample weights."""

    def __init__(self, plan: Plan, image: Path) -> None:
        super().__init__(plan, image)
        self._shape = weights_shape(self._twin)
        check_kernels(self._image, plan.op, self._shape.symbols)

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        bounds_check: str,
        seed: int | None = None,
    ) -> Tensor:
        """Returns one number per id. Raises as an update does."""
        copies = _GuardedTables(self.plan, metadata, tables)
        read = gradient_arguments(copies.metadata, _guarded_batch(batch), _guarded(gradients), bounds_check)
        call, result = weight_gradient_call(self._shape, read, guarded_empty)
        memory = copies.memory()
        status = _describe(call, memory, writable=set())
        self._run(call, memory, status, batch, bounds_check, self._seed() if seed is None else seed)
        _raise_unwritten(self.plan, memory, call.by_name, "weight_gradient")
        return result


class _GuardedTables:
    """Guarded copies of tables and states. Those of more than `MOST_COPIED` bytes are not copied."""

    def __init__(
        self, plan: Plan, metadata: Metadata, tables: Sequence[Tensor], states: Sequence[Tensor] | None = None
    ) -> None:
        self._writable = states is not None
        self._names = [table.name for table in plan.spec.tables]
        self._originals = [*tables, *(states or ())]
        self._copies = [guarded_copy(t) if spanned_bytes(t) <= MOST_COPIED else t for t in self._originals]
        words = guarded_copy(metadata.words)
        distances = [copy.data_ptr() - original.data_ptr() for original, copy in self._pairs()]
        for name, moved in (("address", distances[: len(tables)]), ("state", distances[len(tables) :])):
            if not moved:
                continue
            words[:, UPDATE_METADATA_WORDS.index(name)] += torch.tensor(moved, dtype=torch.int64, device="cpu")
        self.metadata = Metadata(words, words.data_ptr())

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._originals, self._copies, strict=True)

    def memory(self) -> Memory:
        """The regions that hold the tables and states."""
        memory = Memory()
        names = [f"{TABLE}{name}" for name in self._names] + [f"states of {name}" for name in self._names]
        for name, tensor in zip(names, self._copies, strict=False):
            memory.known(name, tensor, writable=self._writable)
        return memory

    def copy_back(self) -> None:
        """Copies what kernels wrote to the tables and states themselves."""
        for original, copy in self._pairs():
            if original.data_ptr() != copy.data_ptr():
                ctypes.memmove(original.data_ptr(), copy.data_ptr(), spanned_bytes(original))


def _describe(call: Call, memory: Memory, writable: set[str]) -> Tensor:
    """Adds the tensors of a call to its memory, and new status words, which it returns."""
    status = guarded_empty((status_size(),), torch.int64, CPU).zero_()
    memory.known("status", status, writable=True)
    memory.describe(call.by_name, call.space, writable)
    return status


def _raise_unwritten(plan: Plan, memory: Memory, arguments: dict[str, Value], name: str) -> None:
    result = arguments[name]
    if not isinstance(result, Tensor) or not result.numel():
        return
    missing = memory.unwritten(name)
    if missing is not None:
        element = missing // result.element_size()
        raise KernelBugError(f"kernels of {plan.uri}: unwritten: no kernel wrote element {element} of {name}")


def _guarded_batch(batch: Batch) -> Batch:
    weights = None if batch.weights is None else guarded_copy(batch.weights)
    return batch._replace(values=guarded_copy(batch.values), offsets=guarded_copy(batch.offsets), weights=weights)


def _guarded(gradients: Gradients) -> Gradients:
    pooled, *others = gradients
    return Gradients(guarded_copy(pooled), *(None if tensor is None else guarded_copy(tensor) for tensor in others))
