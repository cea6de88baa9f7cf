"""The English of a file: comments, docstrings, sentences in string literals, text of HTML, Markdown without its code,
help texts of a Makefile."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

C_LIKE = (".h", ".cpp", ".cu", ".js", ".css")
"""Kinds of files with the comments and string literals of C. Templates (.j2) of such files are read in the same way."""

SUFFIXES = (".py", ".md", ".toml", ".j2", *C_LIKE)
"""Kinds of files that have English."""

WORDS_OF_A_SENTENCE = 4
"""A string literal with fewer words than this is taken for data, not for a message."""

PLACEHOLDER = "…"
"""Takes the place of code in the text: what an f-string inserts, `code` in backticks."""

EXPRESSION = re.compile(r"\{[{%#].*?[}%#]\}", re.DOTALL)
"""What Jinja takes out of a template: an expression, a statement or a comment."""


class Prose(NamedTuple):
    """A paragraph, comment, docstring or message, with its line breaks, so that places in it have lines."""

    line: int
    text: str

    def line_at(self, position: int) -> int:
        return self.line + self.text.count("\n", 0, position)


def prose_of(path: Path) -> list[Prose]:
    """Everything that a person reads as English in a file; an empty list for a kind of file that has none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = [*_python_comments(text), *_python_strings(text)]
    elif path.suffix == ".md":
        found = [*_markdown(text)]
    elif path.name == "Makefile":
        found = [*_joined((number, line[1:]) for number, line in _lines(text) if line.startswith("#"))]
        found += [Prose(number, line.partition(" ## ")[2]) for number, line in _lines(text) if " ## " in line]
    elif path.suffix == ".toml":
        found = [*_joined((number, line[1:]) for number, line in _lines(text) if line.startswith("#"))]
    elif path.suffix in (".j2", *C_LIKE):
        plain = _without_expressions(text)
        found = [*_blocks(text, r"\{#-?(.*?)-?#\}"), *_blocks(plain, r"/\*(.*?)\*/"), *_slash_comments(plain)]
        found += [*_c_strings(re.sub(r"(?<!:)//[^\n]*", "", plain)), *_c_strings(_expressions(text))]
        if path.name.endswith(".html.j2"):
            found += [*_html(plain)]
    else:
        found = []
    return sorted(Prose(line, _without_code(text)) for line, text in found)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return enumerate((line.strip() for line in text.splitlines()), start=1)


def _joined(comments: Iterator[tuple[int, str]]) -> Iterator[Prose]:
    """Comments on lines that follow each other, as one paragraph: sentences continue over line ends."""
    paragraph: list[str] = []
    first = 0
    for line, text in comments:
        if paragraph and line != first + len(paragraph):
            yield Prose(first, "\n".join(paragraph))
            paragraph = []
        first = first if paragraph else line
        paragraph.append(text.strip())
    if paragraph:
        yield Prose(first, "\n".join(paragraph))


def _python_comments(source: str) -> Iterator[Prose]:
    whole, trailing = [], []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|pragma)", token.string):
            alone = token.line.lstrip().startswith("#")
            (whole if alone else trailing).append((token.start[0], token.string.lstrip("# ")))
    yield from _joined(iter(whole))
    yield from (Prose(*comment) for comment in trailing)


def _python_strings(source: str) -> Iterator[Prose]:
    """Docstrings, those of attributes included, and other literals that read as sentences."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values]
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        if text is not None and (id(node) in docstrings or _reads_as_a_sentence(text)):
            yield Prose(node.lineno, text)


def _reads_as_a_sentence(text: str) -> bool:
    return len(re.findall(r"(?<![\w.])[a-zA-Z']+(?= |[.,:;!?]|$)", text)) >= WORDS_OF_A_SENTENCE


def _markdown(text: str) -> Iterator[Prose]:
    """Paragraphs, list items, rows of tables, and comments in fenced and indented code; no sections that a program
    writes (from `<!-- name: written by ... -->` to `<!-- end of name -->`)."""
    paragraph: list[str] = []
    first, fenced, in_list, written = 0, False, False, False
    for number, line in [*enumerate(text.splitlines(), start=1), (0, "")]:
        fence = line.lstrip().startswith("```")
        starts = bool(re.match(r"\s*([-*|#>]|\d+\.) ?", line))
        written = (written or ": written by " in line) and not line.startswith("<!-- end of")
        code = written or fenced or fence or (line.startswith("    ") and not paragraph and not in_list)
        if paragraph and (starts or code or not line.strip()):
            yield Prose(first, "\n".join(paragraph))
            paragraph = []
        fenced ^= fence
        if code and not written and (comment := re.search(r"(?:^|\s)# (.*)", line)):
            yield Prose(number, comment[1])
        if code or not line.strip():
            continue
        in_list = (starts and not line.startswith("#")) or (in_list and line.startswith(" "))
        first = first if paragraph else number
        paragraph.append(re.sub(r"^\s*([-*#>]+|\d+\.) ", "", line).strip())


def _blocks(text: str, pattern: str) -> Iterator[Prose]:
    for match in re.finditer(pattern, text, re.DOTALL):
        lines = [line.strip().removeprefix("*").strip() for line in match[1].splitlines()]
        yield Prose(text.count("\n", 0, match.start()) + 1, "\n".join(lines))


def _slash_comments(text: str) -> Iterator[Prose]:
    whole, trailing = [], []
    for number, line in _lines(text):
        before, mark, comment = line.partition("//")
        if mark and not before.endswith(":"):  # the slashes of a URL
            (trailing if before else whole).append((number, comment))
    yield from _joined(iter(whole))
    yield from (Prose(number, comment.strip()) for number, comment in trailing)


def _c_strings(text: str) -> Iterator[Prose]:
    """String literals that read as sentences; those with nothing but white space between them are one."""
    for match in re.finditer(r'(?:"(?:\\.|[^"\\\n])*"\s*)+', text):
        sentence = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', match[0]))
        if _reads_as_a_sentence(sentence):
            yield Prose(text.count("\n", 0, match.start()) + 1, sentence)


def _html(text: str) -> Iterator[Prose]:
    """What a browser shows: text between tags."""
    position = 0
    for part in re.split(r"(<[^>]*>)", text):
        if not part.startswith("<") and _reads_as_a_sentence(part):
            begin = position + len(part) - len(part.lstrip())
            yield Prose(text.count("\n", 0, begin) + 1, part.strip())
        position += len(part)


def _without_expressions(text: str) -> str:
    """The template with placeholders for Jinja, on the same lines."""
    return EXPRESSION.sub(lambda match: PLACEHOLDER + "\n" * match[0].count("\n"), text)


def _expressions(text: str) -> str:
    """The template's Jinja alone, without its comments, on the same lines."""
    parts, end = [], 0
    for match in EXPRESSION.finditer(text):
        lines = "\n" * text.count("\n", end, match.start())
        parts += [lines, "\n" * match[0].count("\n") if match[0].startswith("{#") else f"{match[0]};"]
        end = match.end()
    return "".join(parts)


def _without_code(text: str) -> str:
    text = re.sub(r"`+[^`]*`+", lambda match: PLACEHOLDER + "\n" * match[0].count("\n"), text)
    return re.sub(r"\]\([^)]*\)", "]", text)
