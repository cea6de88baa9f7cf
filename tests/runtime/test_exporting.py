"""Exported models run in processes that know nothing of the machine that made them, by torch and by AOTInductor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.test_compile import SPEC, WITH_ROWS, batch
from support.tuned_records import FAST, FASTER, record_of
from support.tuned_records import SPEC as TUNED_SPEC
from torch import Tensor, nn

import embforge as ef
from embforge.cli.gen import emit
from embforge.codegen.errors import MissingKernelError, PlanError
from embforge.codegen.machine import X86_NEEDS, host_isa
from embforge.launch import kernels
from embforge.launch.kernels import Program
from embforge.operators import lookup as ops
from embforge.operators.exported import ExportedLookup, lookup_kernel
from embforge.tuner.store import save

ANY = torch.export.Dim.DYNAMIC
CPU = torch.device("cpu")


def run(folder: Path, code: str) -> str:
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"EMBFORGE_QUIET": "1"}
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


class Served(nn.Module):
    """Pooled and unpooled features, weights, and a layer after them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embeddings = ef.EmbeddingCollection(WITH_ROWS, **options)
        self.top = nn.Linear(7, 3)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.embeddings.forward_dict(ids, None, weights, lengths=lengths)
        return found["x"], found["y"], self.top(found["s"])


def inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    values, offsets, _ = batch(WITH_ROWS, size, size)
    return values, offsets.diff().view(len(WITH_ROWS.features), size), torch.rand(len(values))


SERVE = """
import sys
import embforge
import torch
from embforge.codegen import machine
machine.host_isa = lambda: "generic"  # as if this were another machine
model = torch.export.load("model.pt2").module()
assert "embforge.operators.lookup" not in sys.modules
for given, wanted in torch.load("expected.pt"):
    assert all(map(torch.equal, model(*given), wanted))
given[0][0] = 1000
try:
    model(*given)
except IndexError as error:
    print(error)
from embforge.launch.kernels import _LOADED
print(*{kernel.plan.arch for kernel in _LOADED.values()})
"""


def test_an_exported_model_takes_the_kernel_of_the_machine_that_runs_it(tmp_path: Path) -> None:
    model = Served()
    exported = torch.export.export(model, inputs(6), dynamic_shapes=({0: ANY}, {1: ANY}, {0: ANY}))
    torch.export.save(exported, tmp_path / "model.pt2")
    with torch.no_grad():
        batches = [inputs(size) for size in (1, 6, 17)]
        torch.save([(given, model(*given)) for given in batches], tmp_path / "expected.pt")
    with zipfile.ZipFile(tmp_path / "model.pt2") as file:
        content = b"".join(map(file.read, file.namelist()))
    assert b"embforge.lookup" in content and b'\\"schema\\":' in content
    assert not [isa for isa in {*X86_NEEDS, host_isa(), '"arch'} if isa.encode() in content]
    refusal = "feature 'x': id 1000 of sample 0, position 0 is not a row of table 'a'; allowed: 0 to 99 (100 rows)"
    assert run(tmp_path, SERVE) == f"{refusal}\ngeneric"


PAGE = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text(encoding="utf-8")
BAD_ID = """
try:
    one_sample[0][0] = 1000
    model(*one_sample)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


PARTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    """One process makes a model, and another serves it, which imports only torch and embforge."""
    made, loaded, _, _ = PARTS
    run(tmp_path, made)
    run(tmp_path, loaded)


@pytest.mark.soak
def test_aotinductor_serves_what_the_page_makes(tmp_path: Path) -> None:
    """AOTInductor's compiler takes half a minute."""
    made, _, compiled, served = PARTS
    run(tmp_path, made + compiled)
    refusal = "IndexError: feature 'user': id 1000 of sample 0, position 0 is not a row of table 'users'"
    assert run(tmp_path, served + BAD_ID).startswith(refusal)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_trained_module_is_exported_for_serving(ids: torch.dtype) -> None:
    """Also with gradients enabled. Neither its states nor its update are exported."""
    module = ef.EmbeddingCollection(SPEC, backend="reference", optimizer=ef.optim.RowwiseAdagrad(lr=0.1))
    values, offsets, weights = batch(SPEC)
    given = (values.to(ids), offsets.to(ids), weights)
    exported = torch.export.export(module, given)
    assert [name.rpartition(".")[2] for name in exported.constants] == ["weight"] * len(SPEC.tables)
    found = exported.module()(*given)
    assert torch.equal(found, module(*given))
    assert f'"id_dtype":"{str(ids).removeprefix("torch.")}"' in str(exported)


def call(module: ef.EmbeddingCollection, text: str) -> Tensor:
    tables = [module.weight(table.name).detach() for table in module.spec.tables]
    found: Tensor = ops.lookup(*batch(module.spec), tables, None, text, "error")[0]
    return found


def test_an_unknown_schema_names_the_version_that_wrote_it() -> None:
    text = ExportedLookup("reference", "int64", SPEC).text
    module = ef.EmbeddingCollection(SPEC, backend="reference")
    with torch.no_grad():
        assert torch.equal(call(module, text), module(*batch(SPEC)))
    other = re.sub('"embforge":"[^"]+"', '"embforge":"9.8"', text).replace('"schema":', '"schema":9')
    with pytest.raises(PlanError, match=r"exported by embforge 9\.8.* schema 9\d.*export the model again.*or run"):
        call(module, other)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"spec":{', '"specs":{'), ('"target":"reference"', '"target":"tpu"'), ('"int64"', '"int8"'), ("{", "")],
)
def test_a_damaged_text_is_refused(old: str, new: str) -> None:
    text = ExportedLookup("reference", "int64", SPEC).text.replace(old, new, 1)
    with pytest.raises(PlanError, match=r"export (it|the model) again"):
        ExportedLookup.from_text(text)


def test_another_device_is_refused_before_a_kernel_reads_its_memory() -> None:
    with pytest.raises(ValueError, match=r"exported for backend 'cpu' and is called with tensors on cuda:0"):
        ExportedLookup("cpu", "int64", SPEC).plan_on(torch.device("cuda", 0))


def test_a_text_that_names_another_machines_instruction_set_runs() -> None:
    """Graphs that earlier versions exported have such a text."""
    module = ef.EmbeddingCollection(SPEC)
    text = Program(replace(module.plan(), arch="avx1024")).text
    with torch.no_grad():
        assert torch.equal(call(module, text), module(*batch(SPEC)))


def test_fields_are_chosen_where_the_graph_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        ef.EmbeddingCollection(TUNED_SPEC, params=params, batch_size=2048)._exported[torch.int64]
        for params in (None, FASTER)
    ]
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path))
    save(record_of(FAST), "user")
    assert [ExportedLookup.from_text(text).plan_on(CPU).params for text in texts] == [FAST, FASTER]


def test_a_loaded_program_heeds_where_kernels_may_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ef.EmbeddingCollection(SPEC)
    with torch.no_grad():
        served = torch.export.export(module, batch(SPEC)).module()
        wanted = module(*batch(SPEC))
        emit([module.plan()], tmp_path / "kernels")
        monkeypatch.setattr(kernels, "_LOADED", {})
        lookup_kernel.cache_clear()
        monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "empty"))
        monkeypatch.setenv("EMBFORGE_JIT", "0")
        with pytest.raises(MissingKernelError, match="EMBFORGE_JIT=0 forbids compiling it"):
            served(*batch(SPEC))
        monkeypatch.setenv("EMBFORGE_KERNELS", str(tmp_path / "kernels"))
        assert torch.equal(served(*batch(SPEC)), wanted)
