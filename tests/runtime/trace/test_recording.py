"""Recordings of real modules: which calls they record, which not, and that they leave no trace on a module."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import embforge as ef
from embforge import recording as recording_module
from embforge.recording import record
from embforge.trace.file_format import read_trace
from embforge.tuner.workload.workload import Batch, make_batch, parse
from embforge.verify.cases import Case, draw_batch

SPEC = ef.CollectionSpec(
    [ef.TableSpec("a", 100, 4), ef.TableSpec("b", 50, 8)],
    [ef.FeatureSpec("x", "a"), ef.FeatureSpec("y", "b", "mean", weighted=True)],
    name="pair",
)
WITH_ROWS = ef.CollectionSpec(SPEC.tables, [*SPEC.features, ef.FeatureSpec("s", "a", "none")])


def collection(spec: ef.CollectionSpec = SPEC, **options: Any) -> ef.EmbeddingCollection:
    return ef.EmbeddingCollection(spec, backend="reference", **options)


def call_of(seed: int, size: int = 5, spec: ef.CollectionSpec = SPEC) -> tuple[Tensor, Tensor, Tensor]:
    values, offsets, weights = draw_batch(spec, Case(size), seed, torch.device("cpu"))
    assert weights is not None
    return values, offsets, weights


def replayed(path: Path, number: int, spec: ef.CollectionSpec = SPEC) -> Batch:
    return make_batch(spec, parse(f"trace:{path}"), number)


def assert_same(batch: Batch, values: Tensor, offsets: Tensor, weights: Tensor) -> None:
    assert batch.values.tolist() == values.tolist()
    assert batch.offsets.tolist() == offsets.tolist()
    assert batch.weights is not None
    assert batch.weights.tolist() == weights.tolist()


def test_forward_forward_dict_and_training_are_seen_in_normal_form(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    calls = [call_of(seed, size) for seed, size in ((0, 5), (1, 3), (2, 0), (3, 7))]
    with record(module, path) as recording:
        with torch.no_grad():
            module(*calls[0])
            values, offsets, weights = calls[1]
            module.forward_dict(ef.Jagged(values.int(), lengths=offsets.diff().int(), weights=weights))
            module(*calls[2])
        module(*calls[3]).sum().backward()
        assert recording.batches == (4,)
    assert not recording.active
    assert read_trace(path).sizes.tolist() == [5, 3, 0, 7]
    for number, expected in enumerate(calls):
        assert_same(replayed(path, number), *expected)


def test_a_recording_ends_by_itself_and_leaves_nothing_on_the_module(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    before = dict(module.__dict__)
    recording = record(module, path, batches=2)
    for seed in range(4):
        assert recording.active == (seed < 2) != path.exists()
        module(*call_of(seed))
    assert recording.batches == (2,)
    assert module.__dict__.keys() == before.keys()
    written = path.read_bytes()
    recording.stop()
    assert path.read_bytes() == written
    assert_same(replayed(path, 1), *call_of(1))


def test_a_caller_may_use_its_tensors_again(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    values, offsets, weights = call_of(0)
    with record(module, path):
        module(values, offsets, weights)
        values.zero_(), weights.zero_()
    assert_same(replayed(path, 0), *call_of(0))


def test_a_call_that_fails_is_not_seen(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    values, offsets, weights = call_of(0)
    with record(module, path) as recording:
        with pytest.raises(IndexError):
            module(torch.full_like(values, 1000), offsets, weights)
        assert recording.batches == (0,)
        module(values, offsets, weights)
    assert len(read_trace(path)) == 1


def test_ids_that_a_lookup_takes_as_absent_are_left_out(tmp_path: Path) -> None:
    module, path = collection(bounds_check="zero"), tmp_path / "trace.npz"
    values, offsets = torch.tensor([1, 100, 2, 49, -1, 50]), torch.tensor([0, 2, 3, 5, 6])
    weights = torch.arange(6, dtype=torch.float32)
    with record(module, path):
        expected = module(values, offsets, weights)
    batch = replayed(path, 0)
    assert batch.values.tolist() == [1, 2, 49]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 3]
    assert batch.weights is not None
    again = module(*map(torch.from_numpy, (batch.values, batch.offsets, batch.weights)))
    assert torch.equal(again, expected)


def test_calls_with_and_without_weights_in_one_trace(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    with record(module, path):
        module(*call_of(0))
        module(*call_of(1)[:2])
    assert_same(replayed(path, 0), *call_of(0))
    values, offsets, _ = call_of(1)
    assert_same(replayed(path, 1), values, offsets, torch.ones(values.numel()))


def test_every_collection_of_a_model_has_its_file(tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": collection(), "second": collection(WITH_ROWS)})
    model["again"] = model["first"]
    recording = record(model, tmp_path / "trace.npz")
    assert recording.paths == (tmp_path / "trace.npz", tmp_path / "trace-2.npz")
    model["first"](*call_of(0))
    model["second"].forward_dict(*call_of(1, spec=WITH_ROWS))
    model["again"](*call_of(2))
    recording.stop()
    assert [len(read_trace(path)) for path in recording.paths] == [2, 1]
    assert read_trace(recording.paths[1]).features == ("x", "y", "s")
    assert_same(replayed(recording.paths[1], 0, WITH_ROWS), *call_of(1, spec=WITH_ROWS))


def test_two_recordings_of_one_module(tmp_path: Path) -> None:
    module = collection()
    outer = record(module, tmp_path / "outer.npz")
    with record(module, tmp_path / "inner.npz"):
        module(*call_of(0))
    module(*call_of(1))
    outer.stop()
    assert len(read_trace(tmp_path / "outer.npz")) == 2
    assert len(read_trace(tmp_path / "inner.npz")) == 1
    assert "lookup" not in module.__dict__


def test_copies_of_a_module_are_not_recorded(tmp_path: Path) -> None:
    module, kept = collection(), io.BytesIO()
    with record(module, tmp_path / "trace.npz") as recording:
        copied = copy.deepcopy(module)
        torch.save(module, kept)
        kept.seek(0)
        loaded = torch.load(kept, weights_only=False)
        with torch.no_grad():
            copied.weight("a").zero_()
            assert not torch.equal(copied(*call_of(0)), loaded(*call_of(0)))
        assert recording.batches == (0,)
        assert torch.equal(module(*call_of(0)), loaded(*call_of(0)))
        assert recording.batches == (1,)


def test_a_repeated_forward_is_seen_once(tmp_path: Path) -> None:
    module = collection()
    with record(module, tmp_path / "trace.npz") as recording:
        checkpoint(lambda *call: module(*call) * 2, *call_of(0), use_reentrant=False).sum().backward()
        assert recording.batches == (1,)


def test_compiled_calls_are_not_seen_and_the_remedy_works(tmp_path: Path) -> None:
    torch.compiler.reset()
    module = collection()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = compiled(*call_of(0))
        with pytest.warns(RuntimeWarning, match="compiled code.*force_eager"), record(module, tmp_path / "no.npz"):
            assert torch.equal(compiled(*call_of(0)), expected)
        assert not (tmp_path / "no.npz").exists()
        with record(module, tmp_path / "yes.npz"), torch.compiler.set_stance("force_eager"):
            compiled(*call_of(0))
    assert_same(replayed(tmp_path / "yes.npz", 0), *call_of(0))


def test_a_recording_keeps_no_module_alive(tmp_path: Path) -> None:
    module = collection()
    recording, alive = record(module, tmp_path / "trace.npz"), weakref.ref(module)
    module(*call_of(0))
    del module
    gc.collect()
    assert alive() is None
    recording.stop()
    assert len(read_trace(tmp_path / "trace.npz")) == 1


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MOST_BYTES", 200)
    module = collection()
    recording = record(module, tmp_path / "trace.npz", batches=10**9)
    while recording.active:
        module(*call_of(0, size=2))
    assert recording.batches[0] < 10


def test_a_file_that_cannot_be_written_fails_no_call(tmp_path: Path) -> None:
    module, directory = collection(), tmp_path / "gone"
    directory.mkdir()
    record(module, directory / "trace.npz", batches=1)
    directory.rmdir()
    with pytest.warns(RuntimeWarning, match="is lost"):
        found = module(*call_of(0))
    assert torch.equal(found, module(*call_of(0)))


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    module, path = collection(), tmp_path / "trace.npz"
    with record(module, path) as recording:
        module(*call_of(0))
        child = os.fork()
        if child == 0:
            try:
                recording.stop()
            finally:
                os._exit(path.exists())
        assert os.waitpid(child, 0)[1] == 0
        assert recording.active
    assert path.exists()


@pytest.mark.parametrize(
    ("module", "name", "batches", "named"),
    [
        (nn.Linear(2, 2), "t.npz", 1, "Linear has no EmbeddingCollection"),
        (None, "t.txt", 1, "end with .npz"),
        (None, "no/t.npz", 1, "is not a directory"),
        (None, "t.npz", 0, "batches=0"),
    ],
)
def test_wrong_arguments_of_record_are_named(tmp_path: Path, module: Any, name: str, batches: int, named: str) -> None:
    with pytest.raises(ef.WorkloadError, match=named):
        record(module or collection(), tmp_path / name, batches)


SCRIPT = """
import os, sys, time
import torch
import embforge as ef

spec = ef.CollectionSpec([ef.TableSpec("a", 100, 4)], [ef.FeatureSpec("x", "a")])
first, unused, other = (ef.EmbeddingCollection(spec, backend="reference") for _ in range(3))
compiled = torch.compile(first, backend="eager", fullgraph=True)
with torch.no_grad():
    for turn in range(int(sys.argv[1])):
        compiled(torch.tensor([turn, 2, 3]), torch.tensor([0, 1, 3]))
other(torch.tensor([4]), torch.tensor([0, 1]))
os.chdir("/")
print("ready", sys.argv[2:], flush=True)
time.sleep(float(sys.argv[3]))
raise SystemExit(7)
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    (directory / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-c", "from embforge.cli.main import main; main()", "record"]
    return subprocess.Popen(
        [*command, "--out", "trace.npz", "--batches", "3", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_the_command_passes_arguments_output_and_status_on(tmp_path: Path) -> None:
    process = start(tmp_path, "script.py", "5", "--batches", "0")
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 7, stderr
    assert stdout == "ready ['--batches', '0']\n"
    assert read_trace(tmp_path / "trace.npz").values.tolist() == [0, 2, 3, 1, 2, 3, 2, 2, 3]
    assert read_trace(tmp_path / "trace-3.npz").values.tolist() == [4]
    assert not (tmp_path / "trace-2.npz").exists()
    assert "trace.npz: 3 batches, 6 samples, 9 ids" in stderr


def test_ctrl_c_writes_what_was_seen(tmp_path: Path) -> None:
    process = start(tmp_path, "script.py", "2", "x", "600")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the command and its script
    process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT
    assert np.array_equal(read_trace(tmp_path / "trace.npz").sizes, [2, 2])
