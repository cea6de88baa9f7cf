"""Runs a plan's CUDA backward on the CPU by the SIMT executor, and raises what it finds wrong with it.

Tables and states up to `MOST_COPIED` bytes are copied to where nothing lies near them, and copied back once all went
well; larger ones are updated where they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import KERNELS, UPDATE_METADATA_WORDS
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
from embforge.launch.simt.abi import Image, load_image
from embforge.launch.simt.counters import TABLE
from embforge.launch.simt.forward import MOST_COPIED, MOST_SEEDS
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import WORD_BYTES, Memory, launch_kernel, raise_mistakes
from embforge.launch.update_kernel import UpdateKernel

CPU = torch.device("cpu")


class _SimtKernels:
    """One plan's kernels in an image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._twin = twin_of(plan)
        self._image = load_image(image)
        self._calls = count()

    def check(self) -> None:
        """Nothing is ever pending: whatever is wrong raises in the call that has it."""

    def _seed(self) -> int:
        """Every call has another schedule, the same ones in every process."""
        return next(self._calls) % MOST_SEEDS

    def _known(self, symbols: Sequence[str], image: Image) -> None:
        wanted = (WORD_BYTES,) * len(KERNELS[self.plan.op].in_blocks)
        for symbol in symbols:
            kernel = image.kernels.get(symbol)
            if kernel is None or kernel.argument_bytes != wanted:
                raise AssertionError(f"the launcher passes {wanted} to {symbol}, image {image.path} has {kernel}")

    def _run(self, call: Call, memory: Memory, status: Tensor, batch: Batch, bounds_check: str, seed: int) -> None:
        """All steps of a call; what is wrong with the batch raises behind the last.

        Unchecked ids are looked at first: one that is no row of its table may be a row of another, where it would do
        harm that no check of memory finds.
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
        self._known(self._shape.symbols, self._image)

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
        """One update under the schedule of a seed: 0, or infinity if a gradient was not finite.

        Raises what `raise_bad_input` raises, before anything is written; `KernelBugError` for what a kernel does wrong.
        """
        places = _Places(self.plan, metadata, tables, states)
        guarded = guarded_copy(counters)
        read = gradient_arguments(places.metadata, _guarded_batch(batch), _guarded(gradients), bounds_check)
        call = backward_call(self._shape, read, guarded_copy(hyper), guarded, guarded_empty)
        memory = places.memory()
        status = _describe(call, memory, writable={"counters", "verdict"})
        self._run(call, memory, status, batch, bounds_check, self._seed() if seed is None else seed)
        places.copy_back()
        counters.copy_(guarded)
        verdict = call.given["verdict"]
        assert isinstance(verdict, Tensor)
        return verdict


class SimtReduce(_SimtKernels):
    """The gradient of every row that occurs."""

    def __init__(self, plan: Plan, image: Path) -> None:
        super().__init__(plan, image)
        self._shape = backward_shape_of(self._twin)
        self._known(self._shape.symbols, self._image)

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        bounds_check: str,
        seed: int | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """A table's rows and gradients each. Raises as an update does."""
        words = Metadata(guarded_copy(metadata.words), 0)
        read = gradient_arguments(words, _guarded_batch(batch), _guarded(gradients), bounds_check)
        first = reduce_call(self._shape, len(tables), read, guarded_empty)
        memory = Memory()
        status = _describe(first.call, memory, writable={"counts"})
        seed = self._seed() if seed is None else seed
        self._run(first.call, memory, status, batch, bounds_check, seed)
        call, found = first.finish(first.counts.tolist(), self.plan)
        results = {"rows", "gradients"}
        memory.describe({name: call.given[name] for name in sorted(results)}, results, ())
        self._run(call, memory, status, batch, bounds_check, seed)
        for name in sorted(results):
            _raise_unwritten(self.plan, memory, call.given, name)
        return found


class SimtWeightGradient(_SimtKernels):
    """The gradient of per-sample weights."""

    def __init__(self, plan: Plan, image: Path) -> None:
        super().__init__(plan, image)
        self._shape = weights_shape(self._twin)
        self._known(self._shape.symbols, self._image)

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        bounds_check: str,
        seed: int | None = None,
    ) -> Tensor:
        """A number an id. Raises as an update does."""
        places = _Places(self.plan, metadata, tables)
        read = gradient_arguments(places.metadata, _guarded_batch(batch), _guarded(gradients), bounds_check)
        call, result = weight_gradient_call(self._shape, read, guarded_empty)
        memory = places.memory()
        status = _describe(call, memory, writable=set())
        self._run(call, memory, status, batch, bounds_check, self._seed() if seed is None else seed)
        _raise_unwritten(self.plan, memory, call.given, "weight_gradient")
        return result


class _Places:
    """Tables and states where kernels find them."""

    def __init__(
        self, plan: Plan, metadata: Metadata, tables: Sequence[Tensor], states: Sequence[Tensor] | None = None
    ) -> None:
        self._writable = states is not None
        self._names = [table.name for table in plan.spec.tables]
        self._given = [*tables, *(states or ())]
        self._placed = [guarded_copy(t) if spanned_bytes(t) <= MOST_COPIED else t for t in self._given]
        words = guarded_copy(metadata.words)
        distances = [there.data_ptr() - here.data_ptr() for here, there in zip(self._given, self._placed, strict=True)]
        for name, moved in (("address", distances[: len(tables)]), ("state", distances[len(tables) :])):
            if not moved:
                continue
            words[:, UPDATE_METADATA_WORDS.index(name)] += torch.tensor(moved, dtype=torch.int64, device="cpu")
        self.metadata = Metadata(words, words.data_ptr())

    def memory(self) -> Memory:
        memory = Memory()
        names = [f"{TABLE}{name}" for name in self._names] + [f"states of {name}" for name in self._names]
        for name, tensor in zip(names, self._placed, strict=False):
            memory.known(name, tensor, writable=self._writable)
        return memory

    def copy_back(self) -> None:
        for here, there in zip(self._given, self._placed, strict=True):
            if here.data_ptr() != there.data_ptr():
                ctypes.memmove(here.data_ptr(), there.data_ptr(), spanned_bytes(here))


def _describe(call: Call, memory: Memory, writable: set[str]) -> Tensor:
    """Tells the memory of a call's tensors; returns status words for it."""
    status = guarded_empty((status_size(),), torch.int64, CPU).zero_()
    memory.known("status", status, writable=True)
    memory.describe(call.given, call.space, writable)
    return status


def _raise_unwritten(plan: Plan, memory: Memory, given: dict[str, Value], name: str) -> None:
    result = given[name]
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
