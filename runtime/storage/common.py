"""What tables of every kind have in common: why one cannot be trained, and how far from zero its first rows may be."""

from __future__ import annotations

import math

from embforge.codegen.dtypes import FLOATS
from embforge.codegen.spec import TableSpec

NO_TORCH_GRADIENT = (
    "an fp8 table cannot be trained by torch.optim: torch has no fp8 gradients; give the module an optimizer of "
    "embforge.optim, which updates its rows itself, or freeze the table"
)
"""Why an fp8 table that is a parameter cannot be trained."""
NO_RULE = "its optimizer is None, so that it cannot be trained; make the module with an optimizer for it"
"""Why a table that a mapping of optimizers maps to None cannot be trained."""


def starting_bound(table: TableSpec) -> float:
    """How far from zero the numbers of new rows may be: 1/sqrt(rows), but no less than the format's own least bound."""
    return max(1 / math.sqrt(table.num_embeddings), FLOATS[table.dtype].least_bound)
