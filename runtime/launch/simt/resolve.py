"""Runs the kernel of a plan that turns ids into rows on the CPU by the SIMT executor, and raises the bugs that it
finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from embforge.codegen.errors import KernelBugError
from embforge.codegen.kernel import REMAP_WORDS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.simt.toolchain import twin_of
from embforge.inputs import Batch
from embforge.launch.gpu.resolve_call import resolve_call
from embforge.launch.metadata import Metadata
from embforge.launch.simt.abi import load_image
from embforge.launch.simt.forward import MOST_COPIED, MOST_SEEDS
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import Memory, check_kernels, launch_kernel


class SimtResolve:
    """The kernel of a plan in a loaded image. Threads may share it; their launches take turns."""

    def __init__(self, plan: Plan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._calls = count()
        check_kernels(self._image, plan.op, [plan.symbol])

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the rows of the batch's ids: see `ResolveKernel`. Every call has a different schedule.

        Raises `KernelBugError` for a bug in the kernel.
        """
        guarded = [guarded_copy(remap) if spanned_bytes(remap) <= MOST_COPIED else remap for remap in remaps]
        copied = batch._replace(values=guarded_copy(batch.values), offsets=guarded_copy(batch.offsets))
        call = resolve_call(twin_of(self.plan), _moved(metadata, remaps, guarded), copied, guarded_empty)
        memory = Memory()
        for number, remap in enumerate(guarded):
            memory.known(f"remap {number}", remap)
        memory.describe(call.by_name, {"rows"}, ())
        for kernel in call.kernels:
            seed = next(self._calls) % MOST_SEEDS
            launch_kernel(self.plan, self._image, kernel, call.arguments(), memory.regions, seed=seed)
        missing = memory.unwritten("rows") if call.kernels else None
        if missing is not None:
            element = missing // call.rows.element_size()
            raise KernelBugError(f"kernels of {self.plan.uri}: unwritten: no kernel wrote element {element} of rows")
        return call.rows

    def check(self) -> None:
        """Does nothing: the lookup finds mistakes in a batch, so no error is ever pending."""


def _moved(metadata: Metadata, remaps: Sequence[Tensor], guarded: Sequence[Tensor]) -> Metadata:
    """The metadata for kernels that read guarded copies of the remaps."""
    words = guarded_copy(metadata.words)
    addresses = words[:, REMAP_WORDS.index("address")]
    distances = [copy.data_ptr() - original.data_ptr() for original, copy in zip(remaps, guarded, strict=True)]
    addresses[addresses != 0] += torch.tensor(distances, dtype=torch.int64, device="cpu")
    return Metadata(words, words.data_ptr())
