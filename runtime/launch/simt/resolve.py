"""Runs a plan's kernel that turns ids into rows on the CPU by the SIMT executor, and raises what it finds wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import KERNELS, REMAP_WORDS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch
from embforge.launch.gpu.resolve_call import resolve_call
from embforge.launch.metadata import Metadata
from embforge.launch.simt.abi import load_image
from embforge.launch.simt.forward import MOST_COPIED, MOST_SEEDS
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import WORD_BYTES, Memory, launch_kernel


class SimtResolve:
    """One plan's kernel in an image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._calls = count()
        wanted, kernel = (WORD_BYTES,) * len(KERNELS[plan.op].in_blocks), self._image.kernels.get(plan.symbol)
        if kernel is None or kernel.argument_bytes != wanted:
            raise AssertionError(f"the launcher passes {wanted} to {plan.symbol}, image {image} has {kernel}")

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """The rows of a batch's ids, see `ResolveKernel`. Every call has another schedule.

        `KernelBugError` for what the kernel does wrong.
        """
        placed = [guarded_copy(remap) if spanned_bytes(remap) <= MOST_COPIED else remap for remap in remaps]
        copied = batch._replace(values=guarded_copy(batch.values), offsets=guarded_copy(batch.offsets))
        call = resolve_call(twin_of(self.plan), _moved(metadata, remaps, placed), copied, guarded_empty)
        memory = Memory()
        for number, remap in enumerate(placed):
            memory.known(f"remap {number}", remap)
        memory.describe(call.given, {"rows"}, ())
        for kernel in call.kernels:
            seed = next(self._calls) % MOST_SEEDS
            launch_kernel(self.plan, self._image, kernel, call.arguments(), memory.regions, seed=seed)
        missing = memory.unwritten("rows") if call.kernels else None
        if missing is not None:
            place = missing // call.rows.element_size()
            raise KernelBugError(f"kernels of {self.plan.uri}: unwritten: no kernel wrote element {place} of rows")
        return call.rows

    def check(self) -> None:
        """Nothing is ever pending: the lookup finds what is wrong with a batch."""


def _moved(metadata: Metadata, remaps: Sequence[Tensor], placed: Sequence[Tensor]) -> Metadata:
    """The metadata for kernels that find remaps elsewhere."""
    words = guarded_copy(metadata.words)
    addresses = words[:, REMAP_WORDS.index("address")]
    distances = [there.data_ptr() - here.data_ptr() for here, there in zip(remaps, placed, strict=True)]
    addresses[addresses != 0] += torch.tensor(distances, dtype=torch.int64, device="cpu")
    return Metadata(words, words.data_ptr())
