"""Plan -> source text. Templates state facts; what they say is decided in the target's `facts`."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("embforge.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, facts: dict[str, Any]) -> str:
    """The template filled with facts; a fact that the template names and nobody gave is an error."""
    return _environment().get_template(template).render(facts)
