"""How commands fail: a sentence on stderr, an exit code and, with --json, one document on stdout.

The document goes to stdout because a program that wants JSON reads it there: whatever happens, stdout holds exactly one
document, and the exit code or the key `error` says whether it is an error.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import click

from embforge.cli.common import JSON_ASKED, JSON_PRINTED, TOOLCHAIN_ERROR, USAGE_ERROR, print_json

UNEXPECTED = 1
"""Python's own exit code for an exception, and click's for Ctrl-C."""
JSON_ERRORS = (
    "With --json, stdout holds one JSON document whatever happens. An error is written as "
    '{"error": {"type": "SpecError", "message": "...", "exit_code": 2}}; the message is printed on stderr, too.'
)
_WORDS = "embforge.words"
"""A key of a context's `meta`: all words of the command line."""


class Commands(click.Group):
    """A group of commands that report a failure by one sentence and an exit code, and with --json by a document.

    Only unexpected errors have a traceback, which follows their document.
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
            raise  # no failure: the command is done, or its output is no longer read, and click ends quietly
        except click.ClickException as error:
            _tell_json(ctx, error, error.format_message(), error.exit_code)
            raise  # click prints it together with the usage
        except (EmbforgeError, OSError) as error:
            sentence = _os_sentence(error) if isinstance(error, OSError) else str(error)
            # Errors in the input (specs, plan fields, workloads) are ValueErrors; the others concern this machine.
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
    """Prints the error as JSON unless the answer is printed already: stdout holds one document only."""
    asked = ctx.meta[JSON_ASKED] if JSON_ASKED in ctx.meta else _among(ctx.meta[_WORDS])
    if asked and JSON_PRINTED not in ctx.meta:
        print_json(_document(error, sentence, code))


def _among(words: list[str]) -> bool:
    """Whether --json is in a command line that has a mistake, so that click has not read it to its end."""
    return "--json" in takewhile(lambda word: word != "--", words)


def _document(error: BaseException, sentence: str, code: int) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": sentence, "exit_code": code}}


def _os_sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
