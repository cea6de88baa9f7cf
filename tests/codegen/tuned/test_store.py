"""Files of tuned results: what is written is read back; what is damaged, foreign or newer is named and skipped."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples
from support.tuned_records import FAST, FASTER, SPEC, record_of, scaled, this_machine

from embforge.codegen.errors import TunedError
from embforge.codegen.params import CudaParams, Params, params_type
from embforge.codegen.tuned.choose import choose
from embforge.codegen.tuned.document import records_from, to_json
from embforge.codegen.tuned.record import NOISE_LIMIT, Gain, Hardware, Record, Shape, Traffic
from embforge.codegen.tuned.shape import file_name
from embforge.codegen.tuned.stores import Problem, read_file, read_store, read_stores, shipped_dir, user_dir
from embforge.tuner.store import Written, export, import_, remove, save

FILE = file_name(record_of().key)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user store; the current directory has no project's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    return tmp_path / "user"


def damaged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file of a record with a change to its data."""
    data = json.loads(to_json([record_of()]))
    change(data["records"][0])
    return json.dumps(data).encode()


WHOLE = to_json([record_of()]).encode()
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "truncated": (WHOLE[:-40], "not JSON"),
    "not UTF-8": (b"\xff\xfe" + WHOLE, "not UTF-8"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "deep": (b"[" * 100_000, "nested deeper than"),
    "another's list": (b"[1, 2]", "no whole number 'embforge_tuned'"),
    "another's object": (b'{"a": 1}', "no whole number 'embforge_tuned'"),
    "newer": (b'{"embforge_tuned": 2, "results": []}', "schema 2, this embforge reads 1; the file is newer: update"),
    "older": (b'{"embforge_tuned": 0, "records": []}', "schema 0, this embforge reads 1; the file is older"),
    "no record": (to_json([]).encode(), "holds 0 results"),
    "two records": (
        to_json([record_of(), record_of(op="backward", rule="none", params=params_type("cpu", "b")())]).encode(),
        "holds 2",
    ),
    "another's name": (to_json([record_of(spec=scaled(SPEC, 2))]).encode(), "its content belongs into forward-cpu-"),
    "an unknown field": (damaged(lambda r: r.update(colour=1)), "records.0.colour: unexpected keyword argument"),
    "an unknown field inside": (damaged(lambda r: r["key"]["shape"].update(colour=1)), "records.0.key.shape.colour"),
    "a missing field": (damaged(lambda r: r.pop("gain")), "records.0.gain: field required"),
    "a text for a number": (
        damaged(lambda r: r.update(noise_floor="1")),
        "noise_floor: input should be a valid number",
    ),
    "a busy machine's": (
        damaged(lambda r: r.update(noise_floor=1.0, gain={"median": 56.0, "low": 40.0, "high": 60.0})),
        "noise_floor='1.0' is not allowed; allowed: 0 to 0.25; with more noise, samples say nothing; measure again",
    ),
    "a truth for a number": (damaged(lambda r: r["key"]["shape"].update(features=True)), "features: input should be"),
    "not a number": (damaged(lambda r: r["gain"].update(median=float("nan"))), "gain.median: input should be a finite"),
    "infinite": (
        damaged(lambda r: r["samples"].update(best=[float("inf"), 1])),
        "samples.best.0: input should be a fin",
    ),
    "a huge number": (damaged(lambda r: r["key"]["shape"].update(features=10**4000)), "features='1000"),
    "a negative size": (damaged(lambda r: r["key"]["hardware"]["sizes"].update(cores=0)), "sizes.cores='0'"),
    "a negative batch": (
        damaged(lambda r: r["key"]["traffic"].update(batch=-1)),
        "traffic.batch='-1.0' is not allowed",
    ),
    "an interval upside down": (
        damaged(lambda r: r["gain"].update(low=9)),
        "gain='9.0 .. 1.23 .. 1.26' is not allowed",
    ),
    "a time of 0": (damaged(lambda r: r["samples"].update(best=[0, 1])), "samples='a time not above 0'"),
    "unpaired samples": (damaged(lambda r: r["samples"].update(best=[1])), "equally many of each, paired by round"),
    "no time zone": (damaged(lambda r: r.update(created="2026-01-31T12:00:00")), "created='2026-01-31T12:00:00'"),
    "another op": (damaged(lambda r: r["key"].update(op="reduce")), "key.op='reduce' is not allowed; allowed: forward"),
    "another target": (damaged(lambda r: r["key"].update(target="simt")), "key.target='simt'"),
    "other ids": (
        damaged(lambda r: r["key"].update(id_dtype="int16")),
        "key.id_dtype='int16' is not allowed; allowed: ",
    ),
    "other caches": (
        damaged(lambda r: r["key"].update(cache="mild")),
        "key.cache='mild' is not allowed; allowed: warm",
    ),
    "a forward with a rule": (damaged(lambda r: r["key"].update(rule="sgd")), "key.rule='sgd'"),
    "another kind of hardware": (damaged(lambda r: r["key"]["hardware"].update(kind="gpu")), "hardware.kind='gpu'"),
    "an unknown plan field": (damaged(lambda r: r["params"].update(speed=9)), "plan field 'speed' does not exist"),
    "a value that is no choice": (
        damaged(lambda r: r["params"].update(tile_vectors=5)),
        "tile_vectors=5 is not allowed",
    ),
    "a choice of another type": (damaged(lambda r: r["params"].update(tile_vectors=4.0)), "tile_vectors=4.0 is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_and_skipped(name: str, user: Path) -> None:
    text, wanted = BAD[name]
    (user / FILE).write_bytes(text)
    save(record_of(FASTER, scaled(SPEC, 2)), "user")
    with pytest.warns(RuntimeWarning, match="tuned results: skipped") as caught:
        choice = choose("forward", "cpu", SPEC, this_machine())
    assert choice.params == FASTER  # of the good file next to it
    assert str(user / FILE) in str(caught[0].message) and wanted in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each file is reported once
        choose("forward", "cpu", SPEC, this_machine())
    assert [problem.path for problem in read_stores()[1]] == [user / FILE]


def test_a_repaired_file_is_read_at_once(user: Path) -> None:
    (user / FILE).write_text("{")
    with pytest.warns(RuntimeWarning, match="not JSON"):
        choose("forward", "cpu", SPEC, this_machine())
    save(record_of(), "user")
    assert choose("forward", "cpu", SPEC, this_machine()).params == FAST
    remove(read_stores()[0][0])
    assert choose("forward", "cpu", SPEC, this_machine()).record is None


def test_directories_that_cannot_be_read(user: Path) -> None:
    user.rmdir()
    assert read_stores() == ([], [])
    user.write_text("a file")
    Path("embforge-tuned").symlink_to("embforge-tuned")
    with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
        assert choose("forward", "cpu", SPEC, this_machine()).record is None
    assert len(caught) == 2 and {problem.path.name for problem in read_stores()[1]} == {"user", "embforge-tuned"}


def test_pipes_links_and_directories_in_a_store_are_skipped(user: Path) -> None:
    """A pipe would keep a reader waiting; a link may lead nowhere."""
    os.mkfifo(user / FILE)
    (user / FILE.replace("forward", "backward")).symlink_to("nowhere")
    (user / "forward-cuda-0123456789abcdef.json").mkdir()
    found, problems = read_stores()
    assert found == [] and len(problems) == 3
    assert all("not a file" in problem.what or "cannot be read" in problem.what for problem in problems)


def test_only_files_that_fit_are_opened(user: Path) -> None:
    (user / "backward-cpu-0123456789abcdef.json").write_text("{")
    (user / "notes.json").write_text("{}")
    (user / ".forward-cpu-0123456789abcdef.json.x1").write_text("{")
    (user / "estimates").mkdir()
    assert read_stores("forward", "cpu") == ([], [])
    assert {problem.path.name for problem in read_stores()[1]} == {"backward-cpu-0123456789abcdef.json", "notes.json"}


def test_a_removed_current_directory_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    save(record_of(), "user")
    assert choose("forward", "cpu", SPEC, this_machine()).params == FAST


def test_where_the_user_store_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_dir() == tmp_path / "mine"
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", "relative")
    assert user_dir() == tmp_path / "relative"
    monkeypatch.delenv("EMBFORGE_TUNED_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_dir().name == "tuned" and user_dir().parent.name == "embforge"


def test_saving_replaces_one_of_the_same_meaning(user: Path) -> None:
    first = save(record_of(FAST), "user")
    second = save(record_of(FASTER, traffic=Traffic(2100, 1.2, 1.0)), "user")
    assert first == second and read_file(first) == record_of(FASTER, traffic=Traffic(2100, 1.2, 1.0))
    assert [path.name for path in user.iterdir()] == [FILE]


def test_other_ids_and_caches_replace_nothing() -> None:
    several = [record_of(FAST, id_dtype=ids, cache=cache) for ids in ("int64", "int32") for cache in ("warm", "cold")]
    paths = [save(record, "user") for record in several]
    assert len(set(paths)) == 4 and [read_file(path) for path in paths] == several


def test_what_could_not_be_read_back_is_not_written(user: Path) -> None:
    for bad in (
        record_of(noise_floor=float("nan")),
        record_of(params=FAST, created="today"),
        record_of(versions={"a": 1j}),
    ):
        with pytest.raises(TunedError, match="measure again"):
            save(bad, "user")
    assert list(user.iterdir()) == []


def test_export_and_import(user: Path, tmp_path: Path) -> None:
    records = [record_of(FAST), record_of(FASTER, scaled(SPEC, 2)), record_of(FAST, scaled(SPEC, 8))]
    assert export([*records, record_of(FASTER)], tmp_path / "out" / "all.json") == 3  # the first of one meaning
    save(record_of(FASTER), "user")
    (user / file_name(records[1].key)).write_text("damaged")
    written = import_(tmp_path / "out" / "all.json", "user")
    assert [one.record for one in written] == records
    assert [type(one.replaced) for one in written] == [Record, Problem, type(None)] and written[
        0
    ].replaced == record_of(FASTER)
    assert [read_file(one.path) for one in written] == records
    moved = import_(written[0].path, "project")
    assert moved == [Written(records[0], tmp_path / "embforge-tuned" / FILE, None)]


@pytest.mark.parametrize("bad", ["damaged", "busy", "twice", "unreadable"])
def test_import_checks_all_before_it_writes_any(bad: str, user: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    data = json.loads(to_json([record_of(), record_of(spec=scaled(SPEC, 2))]))
    if bad == "damaged":
        data["records"][1]["params"]["tile_vectors"] = 5
    elif bad == "busy":
        data["records"][1]["noise_floor"] = 1.0
    elif bad == "twice":
        data["records"][1] = data["records"][0]
    file.write_text(json.dumps(data)[: 100 if bad == "unreadable" else None])
    with pytest.raises(TunedError, match=str(file)):
        import_(file, "user")
    assert list(user.iterdir()) == []


text = st.text(st.characters(codec="utf-8"), max_size=8)
sizes = st.integers(1, 2**63)
seconds = st.floats(1e-12, 1e6)


@st.composite
def params(draw: st.DrawFn, target: str, op: str) -> Params:
    from dataclasses import fields

    kind = params_type(target, op)
    return kind(**{f.name: draw(st.sampled_from(f.metadata["choices"])) for f in fields(kind)})


@st.composite
def records(draw: st.DrawFn) -> Record:
    target, op = draw(st.sampled_from(["cpu", "cuda"])), draw(st.sampled_from(["forward", "backward"]))
    kind: Any = "cpu" if target == "cpu" else "gpu"
    low, median, high = sorted(draw(st.tuples(*[st.floats(1e-3, 1e3)] * 3)))
    rounds = draw(st.integers(0, 4))
    numbers = st.none() | st.floats(0, 1e9)
    record = record_of(
        draw(params(target, op)),
        op=op,
        target=target,
        rule=None if op == "forward" else draw(text),
        hardware=Hardware(kind, draw(text), draw(st.dictionaries(text, text)), draw(st.dictionaries(text, sizes))),
        traffic=Traffic(*draw(st.tuples(numbers, numbers, numbers))),
        id_dtype=draw(st.sampled_from(["int64", "int32"])),
        cache=draw(st.sampled_from(["warm", "cold"])),
        workload=draw(text),
        gain=Gain(median, low, high),
        noise_floor=draw(st.floats(0, NOISE_LIMIT)),
        samples=draw(st.dictionaries(text, st.tuples(*[seconds] * rounds), max_size=3)),
        notes=tuple(draw(st.lists(text, max_size=2))),
    )
    words = st.lists(text, max_size=3).map(tuple)
    shape = Shape(draw(text), draw(words), draw(words), draw(sizes), draw(st.floats(1, 1e5)), draw(sizes))
    return replace(record, key=replace(record.key, shape=shape))


@examples(60)
@given(st.lists(records(), max_size=3))
def test_what_is_written_is_read_back(many: list[Record]) -> None:
    assert records_from(to_json(many)) == tuple(many)


@examples(60)
@given(st.data())
def test_no_garbage_makes_choosing_fail(data: st.DataObject) -> None:
    """Bytes cut, changed and replaced at will, in any file of a store: a valid answer, never an exception."""
    directory = user_dir()
    for path in directory.iterdir():
        path.unlink()
    for record in data.draw(st.lists(records(), min_size=1, max_size=3)):
        whole = bytearray(to_json([record]).encode())
        place = data.draw(st.integers(0, len(whole)))
        put = data.draw(st.binary(max_size=6) | st.sampled_from([b"1e999", b"-1", b"null", b"[]", b"NaN", b'"']))
        whole[place : place + data.draw(st.integers(0, 30))] = put
        (directory / file_name(record.key)).write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ("forward", "backward"):
            choice = choose(op, "cpu", SPEC, this_machine(), traffic=Traffic(0, 0.5, 2))
            assert type(choice.params) is params_type("cpu", op) and choice.why
            assert type(choose(op, "cuda", SPEC, this_machine()).params) is params_type("cuda", op)


def test_tuples_survive_json() -> None:
    gpu = Hardware("gpu", "G", {"arch": "sm_90"}, {})
    record = record_of(CudaParams(pipeline=(8, 2)), target="cuda", hardware=gpu)
    (read,) = records_from(to_json([record]))
    assert read == record and read.params["pipeline"] == (8, 2) and read.params == asdict(CudaParams(pipeline=(8, 2)))


def test_what_came_with_the_package_is_valid_and_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBFORGE_SHIPPED_DIR")
    directory = shipped_dir()
    assert directory is not None
    found, problems = read_store("shipped", directory)
    assert found and not problems
    assert all(one.record.gain.median > 1 + one.record.noise_floor for one in found)
