"""How commands fail: a sentence on stderr, an exit code and, with --json, one document on stdout.

The document goes to stdout because that is where a program that asked for JSON reads: whatever happens, stdout holds
exactly one document, and the exit code or its key `error` tells which kind it is.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import click

from embforge.cli.common import JSON_ASKED, JSON_PRINTED, TOOLCHAIN_ERROR, USAGE_ERROR, print_json

UNEXPECTED = 1
"""Python's own exit code for an exception, and click's for Ctrl-C."""
JSON_ERRORS = (
    "With --json, stdout holds one JSON document whatever happens. That of an error is "
    '{"error": {"type": "SpecError", "message": "...", "exit_code": 2}}; people find the message on stderr, too.'
)
_WORDS = "embforge.words"
"""In a context's `meta`: all words of the command line."""


class Commands(click.Group):
    """A group whose failures are one sentence and an exit code, and a document where JSON was asked for.

    Only unexpected errors have a traceback, after their document.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        words = list(args)
        try:
            ctx = super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if _among(words):
                print_json(_document(error, error.format_message(), error.exit_code))
            raise
        ctx.meta[_WORDS] = words
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        from embforge.codegen.errors import EmbforgeError

        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, BrokenPipeError):
            raise  # no failure: the command is done, or the reader of its output left, and click ends quietly
        except click.ClickException as error:
            _tell_json(ctx, error, error.format_message(), error.exit_code)
            raise  # click prints it beside the usage
        except (EmbforgeError, OSError) as error:
            sentence = _os_sentence(error) if isinstance(error, OSError) else str(error)
            # Errors in what was given are ValueErrors (specs, plan fields, workloads); the rest concern this machine.
            code = USAGE_ERROR if isinstance(error, ValueError) else TOOLCHAIN_ERROR
            _tell_json(ctx, error, sentence, code)
            click.echo(f"embforge: {sentence}", err=True)
            ctx.exit(code)
        except (KeyboardInterrupt, click.Abort):
            _tell_json(ctx, KeyboardInterrupt(), "interrupted by Ctrl-C", UNEXPECTED)
            raise
        except Exception as error:
            _tell_json(ctx, error, str(error) or "no message", UNEXPECTED)
            raise


def _tell_json(ctx: click.Context, error: BaseException, sentence: str, code: int) -> None:
    """Prints the document, unless the answer is printed already: what goes wrong after it is no second document."""
    asked = ctx.meta[JSON_ASKED] if JSON_ASKED in ctx.meta else _among(ctx.meta[_WORDS])
    if asked and JSON_PRINTED not in ctx.meta:
        print_json(_document(error, sentence, code))


def _among(words: list[str]) -> bool:
    """Whether a command line asks for JSON. Only for one with a mistake in it, which click has not read to its end."""
    return "--json" in takewhile(lambda word: word != "--", words)


def _document(error: BaseException, sentence: str, code: int) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": sentence, "exit_code": code}}


def _os_sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
