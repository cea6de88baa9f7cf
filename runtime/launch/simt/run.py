"""What all launchers of SIMT images share: one launch, the memory that it may access, and the mistakes in a batch that
it reports."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from embforge.codegen.build import source_of
from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import KERNELS, MISTAKES, STATUS_WORDS, KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.gpu.forward_call import Value
from embforge.launch.simt.abi import BUG, DONE, Counted, Image, Region
from embforge.launch.simt.guarded import spanned_bytes
from embforge.launch.simt.report import bug_of

WORD_BYTES = 8


class Memory:
    """The regions of one call: the memory that kernels may read, may write, and have written so far."""

    def __init__(self) -> None:
        self._defined: dict[str, Tensor] = {}
        self._regions: dict[str, Region] = {}

    @property
    def regions(self) -> list[Region]:
        return [region for region in self._regions.values() if region.bytes]

    def known(self, name: str, tensor: Tensor, *, writable: bool = False) -> None:
        """Adds memory whose content is defined, with the gaps between its rows."""
        self._regions[name] = Region(name, tensor.data_ptr(), spanned_bytes(tensor), 0, writable)

    def blank(self, name: str, tensor: Tensor) -> None:
        """Adds memory that a kernel must write before another one may read it."""
        defined = self._defined[name] = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
        self._regions[name] = Region(name, tensor.data_ptr(), tensor.nbytes, defined.data_ptr(), True)

    def unwritten(self, name: str) -> int | None:
        """The first byte that no kernel wrote; None if all are written."""
        defined = self._defined[name]
        return None if bool(defined.all()) else int(defined.argmin())

    def describe(self, arguments: Mapping[str, Value], blank: Collection[str], writable: Collection[str]) -> None:
        """Adds all tensors among the arguments of a call. `blank` and `writable` are names of arguments."""
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.numel() and name not in self._regions:
                if name in blank:
                    self.blank(name, value)
                else:
                    self.known(name, value, writable=name in writable)


def check_kernels(image: Image, op: str, symbols: Sequence[str]) -> None:
    """Raises AssertionError if an image does not have kernels with these symbols and the arguments of an op."""
    expected = (WORD_BYTES,) * len(KERNELS[op].in_blocks)
    for symbol in symbols:
        kernel = image.kernels.get(symbol)
        if kernel is None or kernel.argument_bytes != expected:
            raise AssertionError(
                f"the launcher passes arguments of {expected} bytes to {symbol}, but image {image.path} has {kernel}"
            )


def launch_kernel(
    plan: KernelPlan,
    image: Image,
    kernel: KernelLaunch,
    arguments: Sequence[Value],
    regions: Sequence[Region],
    *,
    seed: int,
    count: bool = False,
) -> Counted | None:
    """Launches a kernel. Returns its counters if `count` is set.

    Raises `KernelBugError` for a bug in the kernel, or for a launch that GPUs of the plan's architecture would refuse.
    """
    shared = kernel.shared + image.kernels[kernel.symbol].static_shared
    allowed = arch_named(plan.arch).most_shared
    if shared > allowed:
        raise KernelBugError(
            f"kernel {kernel.symbol} cannot be launched: a block needs {shared} bytes of shared memory; allowed on "
            f"{plan.arch}: {allowed}"
        )
    words = [ctypes.c_uint64(_word(value)) for value in arguments]
    status, report, counted = image.launch(
        kernel.symbol,
        (kernel.grid, 1, 1),
        (kernel.block, 1, 1),
        words,
        regions,
        shared=kernel.shared,
        seed=seed,
        count=count,
    )
    if status == BUG:
        raise bug_of(report, image.path, source_of(plan), seed)
    if status != DONE:
        raise KernelBugError(f"kernel {kernel.symbol} cannot be launched: {report.message.decode()}")
    return counted


def raise_mistakes(plan: Plan, status: Tensor, batch: Batch, bounds_check: str) -> None:
    """Raises the mistakes that kernels found in a batch, as the same errors that the CPU backend raises."""
    claimed = dict(zip(MISTAKES, status[:: len(STATUS_WORDS)].tolist(), strict=True))
    if bounds_check != "error":
        del claimed["BAD_ID"]
    if not any(claimed.values()):
        return
    raise_bad_input(plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
    reported = ", ".join(kind for kind, is_claimed in claimed.items() if is_claimed)
    raise KernelBugError(f"kernel {plan.uri} reported {reported} for a batch without mistakes: {status.tolist()}")


def _word(value: Value) -> int:
    """An argument as a 64-bit word: an address, or a number."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value
