"""The word list finds what it says, in every place that has English, and nothing in code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from words.banned import ROOT, Pattern, clean_files, findings, read_list

BANNED = "a table that nobody reads, and its rows"
CLEAN = "a table that no kernel reads, and its rows"
PLACES = {
    "comment.py": "x = 1  # %s\n",
    "docstring.py": '"""A module.\n\n%s\n"""\n',
    "attribute.py": 'class A:\n    x: int\n    """%s"""\n',
    "message.py": "def f(x):\n    raise ValueError(f'{x}: this is %s of it')\n",
    "page.md": "# Title\n\nA paragraph on\n%s.\n\n- item\n",
    "item.md": "- one\n- %s\n",
    "cell.md": "| a | b |\n|---|---|\n| x | %s |\n",
    "fenced.md": "Text:\n\n```sh\nmake x  # %s\n```\n",
    "indented.md": "Text:\n\n    make x  # %s\n",
    "Makefile": "help: ## %s\n\techo\n",
    "facts.toml": "# %s\nx = 1\n",
    "jinja.cu.j2": "{# A macro:\n   %s #}\nint x;\n",
    "star.cu.j2": "/* %s\n * more */\nint x;\n",
    "slashes.cpp.j2": "int x; // %s\n",
    "choice.cu.j2": '// {{ "This is %s" if x else "" }}\nint x;\n',
    "header.h": "// A header:\n// %s\nint x;\n",
    "kernel.cu": "int x; // %s\n",
    "message.cpp": 'void f() { report(\n    "This is %s"); }\n',
    "script.js": "// %s\nlet x;\n",
    "style.css": "/* %s */\nbody { margin: 0; }\n",
    "page.html.j2": "<p>\n{{ x }} This is %s</p>\n",
}
CODE = {
    "name.py": "nobody = 1\nprint('nobody')\nx = {'nobody': nobody}\n",
    "backticks.py": '"""A function that calls `nobody` once."""\n',
    "fenced.md": "Text:\n\n```\nanswer = nobody\n```\n",
    "indented.md": "Text:\n\n    answer = nobody\n\nMore text.\n",
    "written.md": "<!-- results: written by make bench -->\nBytes a row, nobody.\n<!-- end of results -->\n",
    "value.toml": 'x = "nobody"\n',
    "code.cu.j2": "int nobody = 1;\n",
    "expression.cu.j2": "int x = {{ nobody }};  // {{ nobody }}\n",
    "code.h": 'int nobody = 1;\nconst char* x = "nobody";\n',
    "tag.html.j2": '<p class="nobody"></p>\n',
}


def found_in(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return [(finding.line, finding.words) for finding in findings(file, read_list().patterns)]


@pytest.mark.parametrize("name", PLACES)
def test_a_planted_sentence_is_found_and_a_clean_one_is_not(tmp_path: Path, name: str) -> None:
    text = PLACES[name] % BANNED
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if BANNED in line)
    assert found_in(tmp_path, name, text) == [(line, "nobody")]
    assert found_in(tmp_path, name, PLACES[name] % CLEAN) == []


@pytest.mark.parametrize("name", CODE)
def test_code_is_not_read_as_english(tmp_path: Path, name: str) -> None:
    assert found_in(tmp_path, name, CODE[name]) == []


@pytest.mark.parametrize("pattern", read_list().patterns, ids=lambda pattern: pattern.example)
def test_every_pattern_finds_its_example(tmp_path: Path, pattern: Pattern) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"Text before.\n\n{pattern.example}\n", encoding="utf-8")
    assert [(finding.line, finding.sentence) for finding in findings(file, [pattern])] == [(3, pattern.example)]


def test_an_exception_is_not_found(tmp_path: Path) -> None:
    assert found_in(tmp_path, "page.md", "What a crash leaves behind, and what it stands for.\n") == []


def test_a_phrase_is_found_over_a_line_end_and_its_sentence_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("A first sentence. The plan on so\nmany ranks. A last one.\n", encoding="utf-8")
    (finding,) = findings(file, read_list().patterns)
    assert (finding.line, finding.sentence) == (1, "The plan on so many ranks.")


def test_the_command_names_place_words_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "planted.md").write_text(f"This is {BANNED}.\n", encoding="utf-8")
    command = [sys.executable, "-m", "words", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert f"planted.md:1: This is {BANNED}.\n    'nobody': write " in run.stdout


def test_clean_rooms_exist() -> None:
    assert ROOT / "SECURITY.md" in clean_files(read_list())
