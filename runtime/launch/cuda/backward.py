"""Launches a CUDA plan's backward kernels on torch's current stream. Only a reduction waits for the device.

Every call has status words of its own, and the kernel that updates rows looks at them first: a batch with a mistake
changes nothing, and no other batch is touched by it. What a call found is then put where the host looks, see
`Watch.collect`, and raised once: by the next call, which then changes nothing either, or by `check()`. In words that
calls share, as lookups have them, one bad id would stop every update from there to the report; wiped inside of a
captured graph, they would lose what an earlier replay had found. Of several bad batches before a report one is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.backward import backward_shape_of
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.weight_gradient import weights_shape
from embforge.inputs import Batch
from embforge.launch.cuda.errors import mistake
from embforge.launch.cuda.kernels import CudaKernels
from embforge.launch.cuda.watch import status_words
from embforge.launch.gpu.backward_call import (
    Call,
    Launch,
    Step,
    backward_call,
    gradient_arguments,
    reduce_call,
    weight_gradient_call,
)
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import FIRST_CALL, Metadata
from embforge.launch.update_kernel import UpdateKernel

EARLIER_BACKWARD = (
    "That was in the batch of an earlier backward, which changed no row and was no step. The one that raises this has "
    "done nothing yet and can be repeated."
)
UNKNOWN_SIZE = (
    "how many rows have a gradient is only known once the device has counted them, which a graph capture does not "
    "allow; capture a module with a fused optimizer and without accumulate, or run this backward outside of the graph"
)


class _CudaBackward(CudaKernels):
    """One plan's loaded kernels."""

    NOTE = EARLIER_BACKWARD

    def _call(self, device: torch.device, bounds_check: str, call: Call, *, finds: Sequence[Step]) -> None:
        """All steps. `finds` are the first of them, behind which all mistakes are known.

        Whatever else may fail comes before the others, so that a call that raises has written nothing.
        """
        with self._turn(device, bounds_check, _launched(call)) as turn:
            words = status_words(device)
            self._run(device, call, finds, words)
            turn.watch.collect(words)
            turn.tell()
            self._run(device, call, call.steps[len(finds) :], words)

    def _run(self, device: torch.device, call: Call, steps: Sequence[Step], words: Tensor) -> None:
        for step in steps:
            if isinstance(step, Launch):
                self._launch(device, [step.kernel], call.arguments(words, step.level))
            else:
                step()


class CudaBackward(_CudaBackward, UpdateKernel):
    """Updates rows and states."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = backward_shape_of(plan)

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
    ) -> Tensor:
        """One update: 0, or infinity if a gradient was not finite.

        Raises what `CudaForward` raises, and has changed nothing then. A mistake in this batch is raised later; it
        makes the update, and the step, not happen.
        """
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call = backward_call(self._shape, read, hyper, counters)
        self._call(batch.values.device, bounds_check, call, finds=call.steps[:-1])
        return _verdict(call)

    def follow(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        """Raises no news of earlier calls, which would leave this update to one of two rules, and collects none."""
        device = batch.values.device
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call = backward_call(self._shape, read, hyper, counters)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing() and not self._has_loaded(device, _launched(call)):
                raise RuntimeError(FIRST_CALL)
            self._run(device, call, call.steps, status_words(device))
        return _verdict(call)


class CudaReduce(_CudaBackward):
    """The gradient of every row that occurs."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = backward_shape_of(plan)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """A table's rows and gradients each. Waits for the device, and so raises its own batch's mistakes.

        ValueError, IndexError and `LaunchError` as of a forward, RuntimeError in a graph capture.
        """
        device = batch.values.device
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(UNKNOWN_SIZE)
            read = gradient_arguments(metadata, batch, gradients, bounds_check)
            first = reduce_call(self._shape, len(tables), read)
            words = status_words(device)
            self._run(device, first.call, first.call.steps, words)
            error = mistake(self.plan, words.tolist(), bounds_check)
            if error is not None:
                raise error
            second, found = first.finish(first.counts.tolist(), self.plan)
            self._run(device, second, second.steps, words)
        return found


class CudaWeightGradient(_CudaBackward):
    """The gradient of per-sample weights."""

    NOTE = ""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = weights_shape(plan)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """A number an id. Raises what `CudaForward` raises."""
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call, result = weight_gradient_call(self._shape, read)
        self._call(batch.values.device, bounds_check, call, finds=call.steps)
        return result


def _launched(call: Call) -> list[KernelLaunch]:
    return [step.kernel for step in call.steps if isinstance(step, Launch)]


def _verdict(call: Call) -> Tensor:
    verdict = call.given["verdict"]
    assert isinstance(verdict, Tensor)
    return verdict
