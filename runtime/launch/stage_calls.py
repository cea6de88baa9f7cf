"""How stages are called, on every backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Value = Tensor | int | None
"""An argument of a stage. A tensor is passed by its address, None as a null pointer."""


class Stages(Protocol):
    """A loaded library of stages."""

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage. Mistakes in a batch raise nothing: stage `count` writes them to its argument `mistake`."""
