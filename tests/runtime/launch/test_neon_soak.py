"""The NEON kernels executed on an emulated Arm processor (Debian: g++-aarch64-linux-gnu, qemu-user)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from test_cpu_isas import random_batch, random_tables, spec_of

from embforge.codegen.build import source_of
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cpu.isa import FLAGS
from embforge.launch.reference import forward as reference

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

MAIN = """
#include <cstdio>
#include <vector>

static std::vector<int64_t> words(const char* path) {{
    FILE* file = fopen(path, "rb");
    fseek(file, 0, SEEK_END);
    std::vector<int64_t> content(ftell(file) / 8 + 1);
    rewind(file);
    fread(content.data(), 1, content.size() * 8, file);
    fclose(file);
    return content;
}}

int main() {{
    auto tables = words("tables.bin"), values = words("values.bin"), offsets = words("offsets.bin");
    auto weights = words("weights.bin");
    const int64_t begins[] = {{{begins}}};
    std::vector<int64_t> metadata;
    for (int64_t begin : begins) {{
        metadata.push_back(int64_t(tables.data()) + begin);
        metadata.push_back({rows});
    }}
    std::vector<char> pooled({pooled_bytes}), sequence({sequence_bytes});
    const int64_t arguments[] = {{int64_t(metadata.data()), int64_t(values.data()), int64_t(offsets.data()),
                                 int64_t(weights.data()), int64_t(pooled.data()), int64_t(sequence.data()),
                                 {batch}, {ids}, 0, 1}};
    if (embforge::{uri}_words(arguments) != 0) return 1;
    fwrite(pooled.data(), 1, pooled.size(), stdout);
    fwrite(sequence.data(), 1, sequence.size(), stdout);
}}
"""


@pytest.mark.soak
@pytest.mark.parametrize("output_dtype", ["fp32", "fp16", "bf16"])
def test_neon_gives_the_references_bits(output_dtype: str, tmp_path: Path) -> None:
    if not shutil.which(COMPILER) or not shutil.which(EMULATOR):
        pytest.skip(f"no {COMPILER} or {EMULATOR}")
    spec = spec_of(output_dtype)
    plan = Plan("forward", "cpu", "neon", "int64", spec, CpuParams(tile_vectors=2, rows_unrolled=4))
    tables = random_tables(plan)
    batch, elements = random_batch(plan, long_bag=9000)
    blocks = [t.as_strided((t.shape[0], t.stride(0)), (t.stride(0), 1)).view(torch.uint8) for t in tables]
    (tmp_path / "tables.bin").write_bytes(b"".join(block.numpy().tobytes() for block in blocks))
    assert batch.weights is not None
    for name, tensor in (("values", batch.values), ("offsets", batch.offsets), ("weights", batch.weights)):
        (tmp_path / f"{name}.bin").write_bytes(tensor.numpy().tobytes())
    wanted = reference.lookup(spec, batch.values, batch.offsets, batch.weights, tables, bounds_check="error")
    sizes = [block.numel() for block in blocks]
    program = source_of(plan) + MAIN.format(
        begins=", ".join(str(sum(sizes[:i])) for i in range(len(sizes))),
        rows=tables[0].shape[0],
        pooled_bytes=wanted[0].nbytes,
        sequence_bytes=elements * wanted[1].itemsize,
        batch=batch.batch,
        ids=batch.values.numel(),
        uri=plan.uri,
    )
    (tmp_path / "neon.cpp").write_text(program)
    flags = [flag for flag in FLAGS if flag != "-shared"]
    subprocess.run([COMPILER, *flags, "-static", "neon.cpp", "-o", "neon"], cwd=tmp_path, check=True)
    answer = subprocess.run([EMULATOR, "./neon"], cwd=tmp_path, check=True, capture_output=True).stdout
    got = torch.from_numpy(numpy.frombuffer(answer, dtype=numpy.uint8).copy()).view(wanted[0].dtype)
    want = torch.cat([part.flatten() for part in wanted])
    assert got.shape == want.shape
    assert ((got == want) | (got.isnan() & want.isnan())).all()
