"""`embforge schema`: the JSON schema of a spec file, for editors and checks."""

from __future__ import annotations

import click

from embforge.cli.common import json_option, print_json


@click.command()
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON schema of a spec file, for editors and validators. The output is JSON with or without --json."""
    from embforge.codegen.spec_schema import json_schema

    print_json(json_schema())
