"""The kernel cache: keys by content, one build for many processes, damaged entries, folders without write access."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from embforge.codegen import cache
from embforge.codegen.errors import CacheError, CompileError


def recipe(source: str = "text", built: list[Path] | None = None, key: str | None = None) -> cache.Recipe:
    def compile_(path: Path) -> bytes:
        if built is not None:
            built.append(path)
        return b"binary of " + path.read_bytes()

    return cache.Recipe("forward_test_uri", key or cache.key_of({"source": source}), source, ".cu", ".cubin", compile_)


def test_key_depends_on_labels_values_and_their_borders() -> None:
    keys = {
        cache.key_of(fields)
        for fields in (
            {"a": "xy", "b": "z"},
            {"a": "x", "b": "yz"},
            {"ax": "y", "b": "z"},
            {"b": "xy", "a": "z"},
            {"a": "xy"},
            {"a": "xy", "b": "z", "c": ""},
        )
    }
    assert len(keys) == 6
    assert cache.key_of({"a": "1", "b": "2"}) == cache.key_of({"b": "2", "a": "1"})


def test_second_fetch_does_not_compile(fresh_cache: Path) -> None:
    built: list[Path] = []
    first, was_there = cache.fetch(recipe(built=built))
    second, is_there = cache.fetch(recipe(built=built))
    assert (was_there, is_there, len(built)) == (False, True, 1)
    assert first == second
    assert first.binary.read_bytes() == b"binary of text"
    assert first.binary.parent == first.source.parent == cache.entry_dir(recipe())
    assert first.directory.is_relative_to(fresh_cache)


def test_other_source_is_another_entry(fresh_cache: Path) -> None:
    one, _ = cache.fetch(recipe("one"))
    two, _ = cache.fetch(recipe("two"))
    assert one.directory != two.directory
    assert [e.directory for e in cache.entries()] == sorted([one.directory, two.directory])


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "entry.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_entries_are_built_again(fresh_cache: Path, name: str, damage: str) -> None:
    built: list[Path] = []
    entry, _ = cache.fetch(recipe(built=built))
    path = entry.directory / name
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    assert cache.load(entry.directory) is None
    again, was_there = cache.fetch(recipe(built=built))
    assert not was_there and len(built) == 2
    assert again.binary.read_bytes() == b"binary of text"


def test_same_short_key_of_another_kernel_is_not_taken(fresh_cache: Path) -> None:
    entry, _ = cache.fetch(recipe("one", key="0" * 64))
    other, was_there = cache.fetch(recipe("two", key="0" * 12 + "1" * 52))
    assert other.directory == entry.directory and not was_there
    assert other.binary.read_bytes() == b"binary of two"


def test_failed_compilation_leaves_the_source_and_no_entry(fresh_cache: Path) -> None:
    def refuse(path: Path) -> bytes:
        raise CompileError(f"{path}: refused")

    bad = cache.Recipe("forward_bad", cache.key_of({}), "bad text", ".cpp", ".so", refuse)
    with pytest.raises(CompileError) as caught:
        cache.fetch(bad)
    named = Path(str(caught.value).removesuffix(": refused"))
    assert named.read_text() == "bad text"
    assert cache.load(cache.entry_dir(bad)) is None


def test_lock_that_times_out_builds_privately(fresh_cache: Path) -> None:
    directory = cache.entry_dir(recipe())
    directory.mkdir(parents=True)
    with FileLock(directory.with_suffix(".lock")), pytest.warns(UserWarning, match="forward_test_uri.*lock"):
        entry, was_there = cache.fetch(recipe(), lock_timeout=0.05)
    assert not was_there and not entry.directory.is_relative_to(fresh_cache)
    assert entry.binary.read_bytes() == b"binary of text"
    assert stat.S_IMODE(entry.directory.stat().st_mode) == 0o700


def test_cache_that_cannot_be_written_builds_privately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="for this process only"):
        entry, _ = cache.fetch(recipe())
    assert entry.binary.read_bytes() == b"binary of text"


def test_unwritable_home_falls_back_to_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file, so that nothing can be made below it")
    monkeypatch.delenv("EMBFORGE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = cache.cache_dir()
    assert private.parent == tmp_path
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert cache.cache_dir() == private
    private.chmod(0o755)
    with pytest.raises(CacheError, match="EMBFORGE_CACHE_DIR"):
        cache.cache_dir()
    private.rmdir()
    private.symlink_to(tmp_path)
    with pytest.raises(CacheError, match="not a directory"):
        cache.cache_dir()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs Linux")
def test_private_directory_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.delenv("EMBFORGE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"embforge-{os.getuid() + 1}").mkdir(mode=0o700)
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(CacheError, match="belongs to user"):
        cache.cache_dir()


def test_resources_are_kept_for_exactly_their_binary(fresh_cache: Path) -> None:
    entry, _ = cache.fetch(recipe())
    assert cache.load_resources(entry, "v1") is None
    cache.store_resources(entry, "v1", [{"symbol": "k", "registers": 32}])
    assert cache.load_resources(entry, "v1") == [{"symbol": "k", "registers": 32}]
    assert cache.load_resources(entry, "v2") is None
    other = cache.Entry(entry.directory, entry.source, entry.binary, "another hash")
    assert cache.load_resources(other, "v1") is None


def test_clear_removes_kernels_and_nothing_else(fresh_cache: Path) -> None:
    cache.fetch(recipe())
    (fresh_cache / "tuned.json").write_text("{}")
    assert cache.clear() > 0
    assert list(cache.entries()) == [] and (fresh_cache / "tuned.json").exists()
    assert cache.clear() == 0


COUNTING = """
import os, sys, time
from pathlib import Path
from embforge.codegen import cache

def compile_(path):
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"built\\n")
    time.sleep(0.3)
    return b"binary"

while not Path(sys.argv[2]).exists():
    time.sleep(0.005)
recipe = cache.Recipe("forward_race", cache.key_of({"a": "b"}), "source", ".cu", ".cubin", compile_)
entry, was_there = cache.fetch(recipe)
assert entry.binary.read_bytes() == b"binary"
"""


def test_eight_processes_build_once(fresh_cache: Path, tmp_path: Path) -> None:
    log, start = tmp_path / "log", tmp_path / "start"
    workers = [subprocess.Popen([sys.executable, "-c", COUNTING, str(log), str(start)]) for _ in range(8)]
    start.touch()
    assert [w.wait(60) for w in workers] == [0] * 8
    assert log.read_text() == "built\n"


COMPILING = """
import ctypes, json, sys
from pathlib import Path
from embforge.codegen.build import build
from embforge.codegen.plan import Plan

built = build(Plan.from_text(Path(sys.argv[1]).read_text()))
assert getattr(ctypes.CDLL(str(built.binary)), built.plan.uri)
print(json.dumps(built.cached))
"""


def test_eight_processes_compile_one_kernel_once(fresh_cache: Path, tmp_path: Path) -> None:
    from embforge.codegen.machine import host_isa
    from embforge.codegen.params import CpuParams
    from embforge.codegen.plan import Plan
    from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

    spec = CollectionSpec((TableSpec("t", 10, 4),), (FeatureSpec("f", "t"),), name="race")
    text = tmp_path / "plan.json"
    text.write_text(Plan("forward", "cpu", host_isa(), "int64", spec, CpuParams()).text)
    workers = [
        subprocess.Popen([sys.executable, "-c", COMPILING, str(text)], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    answers = [w.communicate(timeout=600)[0] for w in workers]
    assert [w.returncode for w in workers] == [0] * 8
    assert sorted(json.loads(a) for a in answers) == [False] + [True] * 7


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.cu", "entry.json"])
@pytest.mark.parametrize("odd", ["directory", "pipe", "deep"])
def test_entries_with_directories_pipes_or_deep_json_are_built_again(fresh_cache: Path, name: str, odd: str) -> None:
    path = cache.fetch(recipe())[0].directory / name
    path.unlink()
    if odd == "directory":
        (path / "inside").mkdir(parents=True)
    elif odd == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("[" * 100_000)
    entry, was_there = cache.fetch(recipe())
    assert not was_there and entry.binary.read_bytes() == b"binary of text"
    assert cache.fetch(recipe())[1]


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_costs_a_private_build(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    write, left = cache.write_atomically, [writes]

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(fresh_cache):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(cache, "write_atomically", full)
    with pytest.warns(UserWarning, match=r"built for this process only.*No space left"):
        entry, was_there = cache.fetch(recipe())
    assert not was_there and entry.binary.read_bytes() == b"binary of text"
    assert not entry.directory.is_relative_to(fresh_cache)


def test_no_room_anywhere_is_our_own_error(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(cache, "write_atomically", full)
    with pytest.warns(UserWarning), pytest.raises(CacheError, match=r"neither in the cache .*TMPDIR"):
        cache.fetch(recipe())


def test_damaged_bytecode_of_a_template_is_translated_again(fresh_cache: Path) -> None:
    from embforge.codegen.render import _environment

    name, environment = "cpu/forward/forward.cpp.j2", _environment.__wrapped__()
    environment.get_template(name)
    (path,) = (fresh_cache / "templates").iterdir()
    good = path.read_bytes()
    for place in (0, 40, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        _environment.__wrapped__().get_template(name)
        assert path.read_bytes() == good
    path.unlink()
    path.mkdir()
    _environment.__wrapped__().get_template(name)
