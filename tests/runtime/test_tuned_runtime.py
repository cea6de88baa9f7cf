"""Modules use tuned parameters without a flag, report it, and compute the same bits."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tuned_records import FAST, FAST_BACKWARD, FASTER, SPEC, record_of, scaled, this_machine, write_spec

import embforge as ef
from embforge import plan_choice as parameters
from embforge.cli.gen import emit
from embforge.cli.tuned_plans import hardware_for
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.kernel import OPS
from embforge.codegen.params import CpuBackwardParams, CpuParams, CudaParams, ReferenceParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.hardware import this_cpu
from embforge.codegen.tuned.record import Traffic
from embforge.plan_choice import CHOSEN_AS
from embforge.tuner.store import save
from embforge.tuner.study.task import task_of

IDS, OFFSETS = torch.tensor([3, 1, 499, 0, 7, 7]), torch.tensor([0, 2, 3, 5, 6])
TUNED = "tuned on this hardware for zipf:1.05,batch=2048: 1.23x the default (95 %: 1.20 to 1.26), noise floor 0.8 %"


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    return tmp_path / "user"


def module_of(spec: CollectionSpec = SPEC, **given: Any) -> ef.EmbeddingCollection:
    return ef.EmbeddingCollection(spec, **given)


FRESH = """
import sys, torch, embforge as ef
module = ef.EmbeddingCollection(ef.CollectionSpec.from_toml(sys.argv[1]))
with torch.no_grad():
    for table in module.parameters():
        table.copy_(torch.arange(table.numel()).view(table.shape) / 7)
ids, offsets = torch.tensor([3, 1, 499, 0, 7, 7]), torch.tensor([0, 2, 3, 5, 6])
print(module(ids, offsets).view(torch.int32).tolist())
print(ef.explain(module))
"""


def test_a_fresh_process_uses_what_is_stored_and_computes_the_same_bits(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "project" / "mine.toml")

    def fresh() -> tuple[str, str]:
        answer = subprocess.run(
            [sys.executable, "-c", FRESH, str(spec)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "EMBFORGE_QUIET": "1"},
        )
        bits, _, explained = answer.stdout.partition("\n")
        assert answer.stderr == ""
        return bits, explained

    bits, explained = fresh()
    assert "parameters: all have their defaults; default: no store has a tuned forward for cpu" in explained
    save(record_of(FAST), "project", origin=spec)
    tuned_bits, tuned = fresh()
    assert f"parameters: prefetch_bytes=1024, tile_vectors=4; {TUNED}; store: project" in tuned
    assert "  tile_vectors = 4: " in tuned and tuned_bits == bits
    assert "kernel of the gradients of rows: reduce_cpu" in tuned and "no store has a tuned backward for cpu" in tuned


def test_explicit_parameters_go_first() -> None:
    save(record_of(FAST), "user")
    save(record_of(FAST_BACKWARD, op="backward", rule="none"), "user")
    given = module_of(params=FASTER, backward_params=CpuBackwardParams())
    assert {plan.params for plan in given.plans().values()} == {FASTER, CpuBackwardParams()}
    assert {choice.why for choice in given.choices().values()} == {"set by params=", "set by backward_params="}
    assert {plan.params for plan in module_of().plans().values()} == {FAST, FAST_BACKWARD}
    with pytest.raises(ValueError, match=r"params=CudaParams.* does not fit forward on backend 'cpu'; pass a Cpu"):
        module_of(params=CudaParams())
    with pytest.raises(ValueError, match=r"backward_params=CpuParams.* does not fit backward"):
        module_of(backward_params=CpuParams())


def test_every_kernel_of_training_says_why() -> None:
    for rule, params in (("adam", FAST_BACKWARD), ("none", CpuBackwardParams(tile_vectors=4))):
        save(record_of(params, op="backward", rule=rule), "user")
    save(record_of(FAST), "user")
    module = module_of(optimizer=ef.optim.Adam(), accumulate=True)
    plans, choices = module.plans(), module.choices()
    assert set(plans) == set(choices) == {"forward", "train", "backward", "reduce", "step", "merge"}
    assert '"prefetch_bytes":1024' in module.programs[torch.int32].forward  # what is called, compiled or not
    for name, plan in plans.items():
        assert plan.params == choices[name].params == (FAST if name in ("forward", "train") else FAST_BACKWARD)
    text = ef.explain(module)
    assert text.count(f"parameters: radix_bits=8; {TUNED}") == 4 and text.count("parameters: prefetch_bytes=1024") == 2
    assert module_of().plans()["reduce"].params == CpuBackwardParams(tile_vectors=4)


def test_trained_rows_have_the_same_bits() -> None:
    def rows() -> torch.Tensor:
        torch.manual_seed(0)
        module = module_of(optimizer=ef.optim.SGD(lr=0.5))
        module(IDS, OFFSETS).square().sum().backward()
        return module.weight("t").clone()

    before = rows()
    save(record_of(FAST), "user")
    save(record_of(FAST_BACKWARD, op="backward", rule="sgd"), "user")
    assert module_of(optimizer=ef.optim.SGD(lr=0.5)).plans()["backward"].params == FAST_BACKWARD
    assert torch.equal(rows(), before)


def test_batch_size_chooses_and_is_checked() -> None:
    save(record_of(FAST, traffic=Traffic(64), created="2030-01-01T00:00:00Z"), "user")
    save(record_of(FASTER, traffic=Traffic(4096)), "user")
    assert module_of(batch_size=100).plan().params == FAST and module_of(batch_size=5000).plan().params == FASTER
    assert module_of().plan().params == FASTER  # nearer to the usual batch, though not the newest
    for module, is_known in ((module_of(), False), (module_of(batch_size=5000), True)):
        assert ("the module's batch is not known (set it by batch_size=)" in ef.explain(module)) != is_known
    for wrong in (0, -1, 2.0, True, "many"):
        with pytest.raises(ValueError, match=r"batch_size=.* is not allowed; allowed: a whole number from 1"):
            module_of(batch_size=wrong)


def test_hotness_chooses_among_results() -> None:
    spec = CollectionSpec(SPEC.tables, [replace(f, hotness=16) for f in SPEC.features])
    save(record_of(FAST, traffic=Traffic(2048, 1)), "user")
    save(record_of(FASTER, traffic=Traffic(2048, 20), created="2020-01-01T00:00:00Z"), "user")
    assert module_of(spec).plan().params == FASTER and module_of().plan().params == FAST


@pytest.mark.parametrize("backend", ["simt", "reference"])
def test_other_backends_are_not_tuned(backend: Any) -> None:
    save(record_of(FAST), "user")
    module = module_of(backend=backend)
    assert module.plan().params == (CudaParams() if backend == "simt" else ReferenceParams())
    assert module.choices()["forward"].why == f"default: nothing is tuned for {backend}"


def test_a_module_made_on_meta_chooses_when_it_moves() -> None:
    save(record_of(FAST), "user")
    module = module_of(device="meta")
    assert module.plan().params == FAST  # on meta a cpu module is for this machine
    assert module_of(device="meta", backend="cuda").choices()["forward"].why == "default: on meta nothing runs"
    save(record_of(FASTER), "user")
    module.to_empty(device="cpu")
    assert module.plan().params == FASTER  # a move chooses again


def test_copies_and_pickles_choose_again() -> None:
    module = module_of(batch_size=64)
    given = module_of(params=FASTER)
    save(record_of(FAST, traffic=Traffic(64)), "user")
    save(record_of(FASTER, traffic=Traffic(4096), created="2030-01-01T00:00:00Z"), "user")
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.plan().params == FAST and again.plan("int32").params == FAST
        assert torch.equal(again(IDS, OFFSETS), module(IDS, OFFSETS))
    assert copy.deepcopy(given).plan().params == FASTER and module.plan().params == CpuParams()


def test_a_directory_of_kernels_decides_whether_a_tuned_one_is_used(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = module_of().plan()
    save(record_of(FAST), "user")
    tuned = module_of().plan()
    assert tuned.params == FAST
    kernels = tmp_path / "kernels"
    emit([default], kernels)
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "empty"))
    module = module_of(kernels=kernels)
    assert module.plan() == default and module.plan("int32").params == FAST  # of which there is neither
    why = f"default: {kernels} and the cache have no kernel for what is {TUNED.partition(': 1.23x')[0]}"
    assert module.choices()["forward"].why == why and why in ef.explain(module)
    assert "x the default" not in ef.explain(module)
    monkeypatch.setenv("EMBFORGE_KERNELS", str(kernels))
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    assert module_of().plan() == default and module_of().plan("int32").params == CpuParams()
    with torch.no_grad():
        module_of()(IDS, OFFSETS)
    emit([tuned], kernels)
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "empty too"))
    assert module_of().plan() == tuned
    manifest = kernels / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"code_sha256": "', '"code_sha256": "0'))
    assert module_of().plan() == default  # a directory that another version made is an error, not a compilation
    with pytest.raises(MissingKernelError, match="generated by embforge"), torch.no_grad():
        module_of(kernels=kernels)(IDS, OFFSETS)
    monkeypatch.delenv("EMBFORGE_KERNELS")
    assert module_of().choices()["forward"].why.startswith("default: the cache has no kernel for what is tuned on")
    monkeypatch.delenv("EMBFORGE_JIT")
    assert module_of().plan() == tuned


def test_nothing_is_located_unless_it_must_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Plan] = []
    monkeypatch.setattr(parameters, "locate", lambda plan, kernels: asked.append(plan))
    save(record_of(CpuParams()), "user")
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    module_of()  # tuned, and the default is best
    monkeypatch.delenv("EMBFORGE_JIT")
    save(record_of(FAST), "user")
    module_of()
    assert asked == []
    monkeypatch.setenv("EMBFORGE_JIT", "0")
    module_of()
    assert {plan.params for plan in asked} == {FAST, CpuParams()} and {plan.op for plan in asked} == {
        "forward",
        "forward_train",
    }


def test_the_nearest_result_serves_a_similar_spec() -> None:
    save(record_of(FAST), "user")
    choice = module_of(scaled(SPEC, 2)).choices()["forward"]
    assert choice.params == FAST and choice.why.startswith("taken from the nearest tuned result, distance 1 (")
    assert module_of(scaled(SPEC, 100)).plan().params == CpuParams()


def test_each_type_of_ids_has_its_own_choice() -> None:
    save(record_of(FAST), "user")
    nearest = module_of().choices("int32")["forward"]
    assert nearest.params == FAST and "with id_bytes x2" in nearest.why
    save(record_of(FASTER, id_dtype="int32"), "user")
    save(record_of(CpuParams(), cache="cold", created="2030-01-01T00:00:00Z"), "project")  # which no module asks for
    module = module_of()
    assert module.plan().params == FAST and module.plan("int32").params == FASTER
    assert "parameters: prefetch_bytes=4096; tuned on" in ef.explain(module, "int32")
    assert torch.equal(module(IDS, OFFSETS), module(IDS.int(), OFFSETS.int()))


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with two cores, of which torch may use as many as its number of threads says."""
    cpu = this_cpu()
    monkeypatch.setattr(parameters, "this_cpu", lambda: replace(cpu, sizes={**cpu.sizes, "cores": 2}))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_cores")
def test_cores_that_torch_may_not_use_do_not_count() -> None:
    torch.set_num_threads(2)
    save(record_of(replace(FAST, threads=2)), "user")
    both = module_of(batch_size=2048).choices()["forward"]
    assert both.params == replace(FAST, threads=2) and both.why.startswith("tuned on this hardware")
    torch.set_num_threads(1)
    one = module_of(batch_size=2048).choices()["forward"]
    assert one.params == FAST and one.why.startswith("taken from the nearest tuned result, distance 1 (")
    assert "cores x2" in one.why and "threads left to torch: 2 is valid only" in one.why
    torch.set_num_threads(4)
    assert this_machine().sizes["cores"] == 2


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("threads", [1, 2])
def test_tuner_modules_and_gen_see_the_same_machine(threads: int) -> None:
    torch.set_num_threads(threads)
    task = task_of(SPEC, id_dtype="int32", cache="cold")
    assert task.hardware == hardware_for("cpu", task.arch) == this_machine()
    assert task.hardware.sizes["cores"] == threads and hardware_for("cpu", "other").sizes == {}
    key = task.key("uniform,batch=64")
    assert (key.id_dtype, key.cache, key.hardware, key.traffic.batch) == ("int32", "cold", task.hardware, 64)


def test_a_search_begins_with_results_for_its_ids_and_caches() -> None:
    large, small = CpuParams(grain_bytes=262144), CpuParams(grain_bytes=16384)
    save(record_of(large, traffic=Traffic(2048)), "user")
    save(record_of(small, traffic=Traffic(2048), id_dtype="int32", cache="cold"), "user")
    assert task_of(SPEC).seeds()[1:] == task_of(SPEC, id_dtype="int32").seeds()[1:] == [large]
    assert task_of(SPEC, cache="cold").seeds()[1:] == [small]


def test_every_op_says_where_its_fields_come_from() -> None:
    assert CHOSEN_AS.keys() == set(OPS)
