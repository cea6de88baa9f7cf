"""With --json, stdout holds one document whatever happens, and exit codes are as without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from embforge.cli import env as env_module
from embforge.cli.main import main
from embforge.codegen.errors import CacheError


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["gen", "dlrm", "--bogus"], "NoSuchOption", "--bogus"),
        (["gen"], "MissingParameter", "Missing argument 'SPEC'"),
        (["gen", "dlrm", "--target", "tpu"], "BadParameter", "'tpu' is not one of"),
        (["gen", "--json", "dlrm", "--target"], "BadOptionUsage", "requires an argument"),
        (["gen", "none.toml"], "SpecError", "none.toml: no such spec file"),
        (["gne", "dlrm"], "NoSuchCommand", "gne"),
        (["cache"], "NoSuchOption", "--json"),
        ([], "NoSuchOption", "--json"),
        (["record", "--json", "--out", "t.npz", "none.py"], "BadParameter", "none.py"),
        (["plan"], "UsageError", "Missing argument 'SPEC'"),
        (["schema", "more"], "UsageError", "unexpected extra argument"),
        (["tuned", "show", "dlrm", "--bogus"], "NoSuchOption", "--bogus"),
    ],
)
def test_wrong_usage(
    words: list[str], kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = invoke(*words) if "--json" in words else invoke(*words, "--json")
    error = json.loads(told.stdout)["error"]
    assert set(error) == {"type", "message", "exit_code"}
    assert error["exit_code"] == told.exit_code == 2
    assert message in error["message"]
    assert error["type"] == kind
    assert message in told.stderr  # people read there


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CacheError("no place"), 3, "no place"),
        (OSError(28, "No space left on device", "file"), 3, "file: No space left on device"),
        (ValueError("a bug"), 1, "a bug"),
        (AssertionError(), 1, "no message"),
        (KeyboardInterrupt(), 1, "interrupted by Ctrl-C"),
    ],
)
def test_what_goes_wrong_later(error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(env_module, "collect", fail)
    told, plain = invoke("env", "--json"), invoke("env")
    expected = {"type": type(error).__name__, "message": message, "exit_code": code}
    assert json.loads(told.stdout) == {"error": expected}
    assert told.exit_code == plain.exit_code == code
    assert (plain.stdout, plain.stderr) == ("", told.stderr)


def test_an_answer_that_is_printed_is_the_only_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_and_fail(data: Any) -> None:
        print_json(data)
        raise OSError(28, "No space left on device", "file")

    print_json = env_module.print_json
    monkeypatch.setattr(env_module, "print_json", print_and_fail)
    monkeypatch.setattr(env_module, "collect", lambda: {"a": 1})
    told = invoke("env", "--json")
    assert json.loads(told.stdout) == {"a": 1}
    assert told.exit_code == 3


def test_what_belongs_to_a_script_asks_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; print(sys.argv[1:])")
    command = [Path(sys.executable).with_name("embforge"), "record", "--out", tmp_path / "t.npz", tmp_path / "s.py"]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (1, "['--json']\n")


def test_the_form_is_documented() -> None:
    told = " ".join(invoke("--help").stdout.split())
    assert '{"error": {"type": "SpecError", "message": "...", "exit_code": 2}}' in told
    assert 'the key "error"' in " ".join(invoke("gen", "--help").stdout.split())
