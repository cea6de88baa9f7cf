"""With --json, stdout holds exactly one JSON document even if a command fails; exit codes are those without --json."""

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
def test_wrong_usage_is_one_document_and_exit_code_2(
    words: list[str], kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*words) if "--json" in words else invoke(*words, "--json")
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"type", "message", "exit_code"}
    assert error["exit_code"] == result.exit_code == 2
    assert message in error["message"]
    assert error["type"] == kind
    assert message in result.stderr  # a person reads stderr


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
def test_an_error_while_a_command_runs_is_one_document(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(env_module, "collect", fail)
    result, plain = invoke("env", "--json"), invoke("env")
    expected = {"type": type(error).__name__, "message": message, "exit_code": code}
    assert json.loads(result.stdout) == {"error": expected}
    assert result.exit_code == plain.exit_code == code
    assert (plain.stdout, plain.stderr) == ("", result.stderr)


def test_an_error_after_the_answer_adds_no_second_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_and_fail(data: Any) -> None:
        print_json(data)
        raise OSError(28, "No space left on device", "file")

    print_json = env_module.print_json
    monkeypatch.setattr(env_module, "print_json", print_and_fail)
    monkeypatch.setattr(env_module, "collect", lambda: {"a": 1})
    result = invoke("env", "--json")
    assert json.loads(result.stdout) == {"a": 1}
    assert result.exit_code == 3


def test_json_after_the_script_of_record_is_the_scripts_own_option(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; print(sys.argv[1:])")
    command = [Path(sys.executable).with_name("embforge"), "record", "--out", tmp_path / "t.npz", tmp_path / "s.py"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "['--json']\n")


def test_help_shows_the_document_of_an_error() -> None:
    text = " ".join(invoke("--help").stdout.split())
    assert '{"error": {"type": "SpecError", "message": "...", "exit_code": 2}}' in text
    assert 'the key "error"' in " ".join(invoke("gen", "--help").stdout.split())
