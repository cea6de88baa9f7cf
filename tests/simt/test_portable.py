"""The executor with the C library's fibres, which processors other than x86-64 use."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from running import HERE, Buffer, aligned, launch

from embforge.codegen.targets.simt import toolchain as simt
from embforge.launch.simt.abi import Image


def test_fibres_of_the_c_library_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt, "RUNTIME_FLAGS", (*simt.RUNTIME_FLAGS, "-DSIMT_PORTABLE_FIBRES"))
    path = tmp_path / "image.so"
    path.write_bytes(simt.compile_image((HERE / "bugs.cu").read_text(), "bugs.cu"))
    image = Image(path)
    for count in (False, True):
        given, out = aligned(128), aligned(128)
        given[:] = numpy.arange(128)
        buffers = {"in": Buffer(given, writable=False), "out": Buffer(out)}
        sound = launch(image, "sound_barrier", buffers, [128], grid=(2,), block=(64,), count=count)
        assert sound.report is None
        assert (out.reshape(2, 64) == given.reshape(2, 64)[:, ::-1]).all()
        buggy = launch(image, "missing_barrier", buffers, [128], grid=(2,), block=(64,), count=count)
        assert buggy.kind == "race"
