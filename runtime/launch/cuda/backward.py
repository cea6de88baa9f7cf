"""Launches a CUDA plan's backward kernels on torch's current stream. Only a reduction waits for the device.

Every call has its own status words, and the kernel that updates rows reads them first: a batch with a mistake changes
nothing, and has no effect on other batches. The mistake is then copied to the words that the host reads (see
`Watch.collect`) and raised once: by the next call, which then changes nothing either, or by `check()`. If several
batches have mistakes before one is raised, only one of them is reported.

Lookups share their status words between calls. Updates cannot: one bad id would stop all updates until it is reported,
and words that are wiped inside of a captured graph would lose the mistakes of earlier replays.
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
    "This mistake was in the batch of an earlier backward, which changed no row and did not count as a step. The "
    "backward that raises this error has done nothing yet and can be repeated."
)
UNKNOWN_SIZE = (
    "the number of rows that have a gradient is known only after the device has counted them, and a graph capture "
    "cannot wait for the device; capture a module with a fused optimizer and without accumulate, or run this backward "
    "outside of the graph"
)


class _CudaBackward(CudaKernels):
    """The loaded kernels of a plan."""

    NOTE = EARLIER_BACKWARD

    def _call(self, device: torch.device, bounds_check: str, call: Call, *, checks: Sequence[Step]) -> None:
        """Runs all steps of a call. `checks` are its first steps, after which all mistakes in the batch are known.

        Everything that may raise comes before the other steps, so that a call that raises has written nothing.
        """
        with self._turn(device, bounds_check, _launched(call)) as turn:
            words = status_words(device)
            self._run(device, call, checks, words)
            turn.watch.collect(words)
            turn.report()
            self._run(device, call, call.steps[len(checks) :], words)

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
        """Updates rows and states. Returns 0, or infinity if a gradient is not finite and the loss was scaled.

        Raises what `CudaForward` raises, and has changed nothing then. A mistake in this batch is raised later; the
        batch then changes nothing and does not count as a step.
        """
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call = backward_call(self._shape, read, hyper, counters)
        self._call(batch.values.device, bounds_check, call, checks=call.steps[:-1])
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
        """Updates as `UpdateKernel.follow` says. Neither raises errors of earlier calls, because then only some of the
        rules would update, nor reports mistakes in this batch."""
        device = batch.values.device
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call = backward_call(self._shape, read, hyper, counters)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing() and not self._has_loaded(device, _launched(call)):
                raise RuntimeError(FIRST_CALL)
            self._run(device, call, call.steps, status_words(device))
        return _verdict(call)


class CudaReduce(_CudaBackward):
    """Computes the gradient of every row that occurs."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = backward_shape_of(plan)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, for each table, the rows that occur and their gradients. Waits for the device, so it raises mistakes
        in its own batch.

        Raises ValueError, IndexError and `LaunchError` as a forward does, and RuntimeError in a graph capture.
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
            second, results = first.finish(first.counts.tolist(), self.plan)
            self._run(device, second, second.steps, words)
        return results


class CudaWeightGradient(_CudaBackward):
    """Computes the gradients of per-sample weights."""

    NOTE = ""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = weights_shape(plan)

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """Returns one number per id. Raises what `CudaForward` raises."""
        read = gradient_arguments(metadata, batch, gradients, bounds_check)
        call, result = weight_gradient_call(self._shape, read)
        self._call(batch.values.device, bounds_check, call, checks=call.steps)
        return result


def _launched(call: Call) -> list[KernelLaunch]:
    return [step.kernel for step in call.steps if isinstance(step, Launch)]


def _verdict(call: Call) -> Tensor:
    verdict = call.by_name["verdict"]
    assert isinstance(verdict, Tensor)
    return verdict
