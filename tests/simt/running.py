"""Runs small CUDA kernels on the SIMT executor: from a text through a launch to its memory and its report."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from embforge.codegen.cache import Recipe, fetch, key_of
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
from embforge.codegen.targets.simt.toolchain import compile_image, image_fingerprint
from embforge.launch.simt.abi import BUG, DONE, Counted, Image, Region, SimtReport, load_image
from embforge.launch.simt.report import Frame, frames_at

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Buffer:
    """Memory of a launch. `fresh`: nothing of it is defined until a kernel writes it."""

    array: NDArray[Any]
    writable: bool = True
    fresh: bool = False


@dataclass(frozen=True)
class Run:
    """A launch that ended, with a bug or without."""

    image: Image
    report: SimtReport | None
    counted: Counted | None
    defined: Mapping[str, NDArray[numpy.bool_]]

    @property
    def kind(self) -> str | None:
        return None if self.report is None else self.report.kind.decode()

    def frames(self) -> list[Frame]:
        assert self.report is not None
        return frames_at(self.image.path, self.report.place.offset) or []

    def earlier_frames(self) -> list[Frame]:
        assert self.report is not None and self.report.has_other
        return frames_at(self.image.path, self.report.other.offset) or []


@cache
def image_of(text: str, name: str = "kernel.cu") -> Image:
    """The text's image, from the cache or compiled."""
    fields = {**image_fingerprint(DEFAULT_ARCH), "text": text, "name": name}
    compile_text = lambda source: compile_image(source.read_text(), name, DEFAULT_ARCH)  # noqa: E731
    recipe = Recipe(f"test_{Path(name).stem}", key_of(fields), text, ".cu", ".so", compile_text)
    return load_image(fetch(recipe)[0].binary)


def launch(
    image: Image,
    kernel: str,
    buffers: Mapping[str, Buffer],
    numbers: Sequence[int] = (),
    *,
    grid: tuple[int, ...] = (1,),
    block: tuple[int, ...] = (32,),
    shared: int = 0,
    seed: int = 0,
    count: bool = False,
) -> Run:
    """Launches a kernel whose arguments are the buffers, then 32-bit numbers."""
    defined = {name: numpy.zeros(b.array.nbytes, numpy.bool_) for name, b in buffers.items() if b.fresh}
    regions = [
        Region(
            name, b.array.ctypes.data, b.array.nbytes, defined[name].ctypes.data if name in defined else 0, b.writable
        )
        for name, b in buffers.items()
    ]
    arguments: list[Any] = [ctypes.c_uint64(b.array.ctypes.data) for b in buffers.values()]
    arguments += [ctypes.c_int32(number) for number in numbers]
    status, report, counted = image.launch(
        kernel, _three(grid), _three(block), arguments, regions, shared=shared, seed=seed, count=count
    )
    assert status in (DONE, BUG), report.message
    return Run(image, report if status == BUG else None, counted, defined)


def aligned(size: int, dtype: Any = numpy.float32, alignment: int = 256) -> NDArray[Any]:
    """Zeros at an address of the alignment that GPU memory has."""
    item = numpy.dtype(dtype).itemsize
    memory = numpy.zeros(size * item + alignment, numpy.uint8)
    skip = -memory.ctypes.data % alignment
    return memory[skip : skip + size * item].view(dtype)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z
