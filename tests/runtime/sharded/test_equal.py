"""Any number of ranks trains as one does: every kind of sharding, pooling and rule, against an unsharded collection."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

import pytest
from support.sharded.cases import (
    KINDS,
    RULES,
    VARIANTS,
    by_table,
    every_format,
    every_kind,
    one_kind,
    variants_of,
)
from support.sharded.equal import check

from embforge.codegen.dtypes import TABLE_DTYPES

ON_RANKS = {
    size: [every_kind(rule) for number, rule in enumerate(RULES) if number % 4 + 1 == size] for size in (1, 2, 3, 4)
}
"""All rules, with different numbers of ranks. `make soak` trains all rules on all numbers of ranks."""
for _number, _kind in enumerate(KINDS):
    ON_RANKS[2 + _number % 3].append(replace(one_kind(_kind), steps=5))
for _size in (2, 3):
    ON_RANKS[_size].append(by_table())


def test_any_two_choices_occur_together() -> None:
    """Any two of a kind, a pooling with or without weights, and a rule occur in one training."""
    met: set[Any] = set()
    for rule in RULES:
        training = every_kind(rule)
        for feature in training.spec.features:
            choices = (dict(training.kinds)[feature.table], (feature.pooling, feature.weighted), rule)
            met |= {(choices[i], choices[j]) for i, j in ((0, 1), (0, 2), (1, 2))}
    missing = {*product(KINDS, VARIANTS), *product(KINDS, RULES), *product(VARIANTS, RULES)} - met
    assert not missing, f"nowhere together: {sorted(missing, key=str)}"


def test_choices_occur_together_for_any_number_of_variants() -> None:
    for count in range(1, 4 * len(VARIANTS)):
        variants: list[Any] = [("sum", number) for number in range(count)]
        met: set[Any] = set()
        for rule, kind in product(RULES, KINDS):
            taken = variants_of(rule, kind, variants)
            assert 1 <= len(taken) <= ceil(count / len(KINDS))
            met |= {*product(taken, (rule, kind))}
        missing = {*product(variants, (*RULES, *KINDS))} - met
        assert not missing, f"of {count} variants, nowhere together: {sorted(missing)}"


@pytest.mark.parametrize("size", ON_RANKS)
def test_ranks_train_as_one(size: int) -> None:
    check(ON_RANKS[size], size)


def test_compiled_kernels_train_as_one() -> None:
    """The CPU's kernels on two ranks: rows are sent one by one and pooled, and the rule needs whole rows."""
    kinds = (("t0", "modulo"), ("t1", "column_wise"))
    check([replace(one_kind("modulo", "rowwise_adagrad"), kinds=kinds)], 2, backend="cpu")


@pytest.mark.parametrize(
    ("backend", "dtypes"),
    [
        ("reference", TABLE_DTYPES),
        ("cpu", ("fp32", "fp8_e4m3")),
        pytest.param("cpu", TABLE_DTYPES, marks=pytest.mark.soak),
    ],
    ids=["reference", "cpu", "cpu-all"],
)
def test_tables_of_every_format_train_as_one(backend: str, dtypes: tuple[str, ...]) -> None:
    check([every_format(dtypes)], 2, backend=backend)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "lamb"])
def test_columns_on_unequal_numbers_of_ranks_train_as_one(rule: str) -> None:
    """A grid of two pieces on three ranks: two ranks hold one piece, one holds the other; the rules need whole rows."""
    check([one_kind("grid", rule)], 3)


@pytest.mark.soak
@pytest.mark.parametrize("size", ON_RANKS)
def test_every_rule_on_any_number_of_ranks(size: int) -> None:
    check([*map(every_kind, RULES), *map(one_kind, KINDS)], size)


@pytest.mark.soak
@pytest.mark.parametrize("size", ON_RANKS)
def test_compiled_kernels_train_all_as_one(size: int) -> None:
    check(ON_RANKS[size], size, backend="cpu")


@pytest.mark.soak
def test_emulated_gpus_train_as_one() -> None:
    """The CUDA kernels run in the emulator, and ranks exchange by gloo."""
    kinds = (("t0", "modulo"), ("t1", "column_wise"))
    check([replace(one_kind("modulo"), kinds=kinds, steps=3)], 2, backend="simt")
