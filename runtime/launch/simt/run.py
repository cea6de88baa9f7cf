"""What all launchers of SIMT images share: one launch, the memory it may touch, and the mistakes it reports."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from embforge.codegen.build import source_of
from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import MISTAKES, STATUS_WORDS, KernelPlan
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
    """The regions of one call: what kernels may read, what they may write, and what was written so far."""

    def __init__(self) -> None:
        self._defined: dict[str, Tensor] = {}
        self._regions: dict[str, Region] = {}

    @property
    def regions(self) -> list[Region]:
        return [region for region in self._regions.values() if region.bytes]

    def known(self, name: str, tensor: Tensor, *, writable: bool = False) -> None:
        """Memory that holds what it holds: rows with the gaps between them."""
        self._regions[name] = Region(name, tensor.data_ptr(), spanned_bytes(tensor), 0, writable)

    def blank(self, name: str, tensor: Tensor) -> None:
        """Memory that nobody may read before a kernel wrote it."""
        defined = self._defined[name] = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
        self._regions[name] = Region(name, tensor.data_ptr(), tensor.nbytes, defined.data_ptr(), True)

    def unwritten(self, name: str) -> int | None:
        """The first byte that nobody wrote."""
        defined = self._defined[name]
        return None if bool(defined.all()) else int(defined.argmin())

    def describe(self, given: Mapping[str, Value], blank: Collection[str], writable: Collection[str]) -> None:
        """All tensors among a call's arguments."""
        for name, value in given.items():
            if isinstance(value, Tensor) and value.numel() and name not in self._regions:
                if name in blank:
                    self.blank(name, value)
                else:
                    self.known(name, value, writable=name in writable)


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
    """One launch, and its counters if asked for.

    `KernelBugError` for what the kernel does wrong, or for a launch that no GPU of the plan's would take.
    """
    shared = kernel.shared + image.kernels[kernel.symbol].static_shared
    allowed = arch_named(plan.arch).most_shared
    if shared > allowed:
        raise KernelBugError(
            f"kernel {kernel.symbol} cannot be launched: a block takes {shared} bytes of shared memory; allowed on "
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
    """Raises what kernels found wrong with a batch, by the CPU backend's sentences."""
    claimed = dict(zip(MISTAKES, status[:: len(STATUS_WORDS)].tolist(), strict=True))
    if bounds_check != "error":
        del claimed["BAD_ID"]
    if not any(claimed.values()):
        return
    raise_bad_input(plan.spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
    named = ", ".join(kind for kind, found in claimed.items() if found)
    raise KernelBugError(f"kernel {plan.uri} reported {named} for a batch that is well-formed: {status.tolist()}")


def _word(value: Value) -> int:
    """An argument as a 64-bit word: an address, or a number."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value
