"""Probes with the reference's results, and the comparison of results."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec
from embforge.launch.reference.forward import lookup
from embforge.verify.cases import Case, draw_batch, draw_tables
from embforge.verify.lookups import first_difference
from embforge.verify.probes import Probe


def same(want: Tensor | None, have: Tensor | None) -> bool:
    """Whether two results have the same bits; all NaNs count as equal."""
    if want is None or have is None:
        return want is have
    return first_difference(want, have) is None if want.is_floating_point() else torch.equal(want, have)


def probe_of(spec: CollectionSpec, case: Case, seed: int) -> Probe:
    drawn, tables = draw_batch(spec, case, seed), draw_tables(spec, seed, special=seed % 2 == 0)
    return Probe(case, seed % 2 == 0, drawn, tables, lookup(spec, *drawn, tables, bounds_check="zero"))
