"""Commands of `embforge`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from embforge.cli.main import main


def run(*words: str | Path, code: int = 0, columns: int | None = None) -> Result:
    """Runs `embforge WORDS` on a screen with this many columns. Unexpected exceptions and other exit codes fail."""
    environment = None if columns is None else {"COLUMNS": str(columns)}
    result = CliRunner().invoke(main, [str(word) for word in words], env=environment)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*words: str | Path, code: int = 0) -> Any:
    """Runs `embforge WORDS --json` and returns the document that it prints."""
    return json.loads(run(*words, "--json", code=code).stdout)
