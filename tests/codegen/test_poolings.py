"""The table of poolings is complete, and other files read its facts instead of comparing names."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from support.selections import SELECTIONS

from embforge.codegen.errors import SpecError
from embforge.codegen.poolings import (
    COMBINERS,
    DIVIDE,
    EACH_ROW,
    MEANINGS,
    POOLINGS,
    RESULTS,
    SELECTING,
    Combiner,
    Divisor,
    Pooling,
    PoolingName,
    Result,
    Shape,
    pooling_named,
    selections_of,
)
from embforge.codegen.spec import SYNONYMS, FeatureSpec
from embforge.codegen.spec_schema import json_schema
from embforge.launch.reference.forward import stays

ROOT = Path(__file__).parents[2]
PRODUCT = ("cli", "codegen", "runtime", "templates", "tuner")
NUMBERS = (0.0, -0.0, 1.5, -2.0, torch.inf, -torch.inf, torch.nan)
TESTED = re.compile(r"\.pooling (?:[=!]= [\"']|(?:not )?in )")
PEERS = ("runtime/verify/against_torch.py", "tuner/bench/peers.py")
"""Files that may name poolings, because they say which ones torch and FBGEMM have."""


def test_the_names_are_those_of_the_table() -> None:
    assert get_args(PoolingName) == tuple(POOLINGS)
    assert all(name == pooling.name for name, pooling in POOLINGS.items())
    assert get_args(Result) == RESULTS and {p.result for p in POOLINGS.values()} == set(RESULTS)


def test_each_pooling_has_the_facts_that_kernels_were_written_for() -> None:
    facts = {p.name: (p.result, p.kept, p.undivided.name, p.partial.name) for p in POOLINGS.values()}
    assert facts["sum"] == ("summed", None, "sum", "sum")
    assert facts["mean"] == ("divided", "divisor", "sum", "sum")
    assert facts["sqrtn"] == ("rooted", "divisor", "sum", "sum")
    assert {"max", "min"} <= set(SELECTIONS)
    assert all(facts[name] == ("selected", "winner", name, name) for name in SELECTIONS)
    assert facts["concat"] == ("concat", None, "concat", "none")
    assert facts["none"] == ("sequence", None, "none", "none")
    assert [name for name, p in POOLINGS.items() if not p.pooled] == ["concat", "none"]
    assert not POOLINGS["max"].weightable and POOLINGS["concat"].weightable


def test_numbers_of_poolings_in_kernels_have_not_changed() -> None:
    """Stage libraries and the words that ranks exchange hold these numbers, so they must not change."""
    assert {name: pooling.action for name, pooling in POOLINGS.items() if pooling.pooled} == {
        "sum": 0,
        "mean": 1,
        "sqrtn": 1,
        "max": 2,
        "min": 3,
    }
    assert (int(Divisor.WEIGHTS), int(Divisor.ROOT)) == (1, 2)
    actions = [combiner.action for combiner in COMBINERS]
    assert len({*actions, DIVIDE}) == len(actions) + 1


@pytest.mark.parametrize("combiner", COMBINERS, ids=lambda combiner: combiner.name)
def test_what_a_combiner_begins_with_changes_nothing(combiner: Combiner) -> None:
    for number in NUMBERS:
        first, item = torch.tensor(combiner.identity), torch.tensor(number)
        result = torch.where(stays(combiner, first, item), first, item) if combiner.selects else first + item
        assert torch.equal(result.nan_to_num(7.0), item.nan_to_num(7.0))
        if combiner.selects:  # `torch.equal` sees no sign of zeros; sums of nothing but -0 are +0
            assert torch.equal(result.signbit(), item.signbit()), f"{first} and then {number}"


@pytest.mark.parametrize("combiner", SELECTING.values(), ids=lambda combiner: combiner.name)
def test_the_first_of_equals_stays_and_nan_does(combiner: Combiner) -> None:
    python = {">=": float.__ge__, "<=": float.__le__}[combiner.comparison]
    for first, second in product(NUMBERS, NUMBERS):
        kept = bool(stays(combiner, torch.tensor(first), torch.tensor(second)))
        assert kept == (python(first, second) or first != first)
        if first == second:
            assert kept


def test_selections_of_poolings() -> None:
    """In the order of combiners; an order even if nothing is selected."""
    every = tuple(SELECTING.values())
    assert selections_of(reversed(POOLINGS.values())) == every
    assert selections_of([POOLINGS["mean"], POOLINGS["concat"]]) == selections_of([]) == every[:1]
    for pooling in (pooling for pooling in POOLINGS.values() if pooling.selects):
        assert selections_of([POOLINGS["sum"], pooling]) == (pooling.combiner,)


def test_contradicting_facts_of_a_pooling_are_refused() -> None:
    maximum = POOLINGS["max"].combiner
    for wrong in (
        lambda: Pooling("sum", "their sum"),
        lambda: Pooling("none", "rows", Shape.SEQUENCE, maximum),
        lambda: Pooling("max", "a mean of maxima", combiner=maximum, divisor=Divisor.ROOT),
    ):
        with pytest.raises(AssertionError, match=r"^pooling '"):
            wrong()
    with pytest.raises(AssertionError, match="there are no partial pools"):
        POOLINGS[EACH_ROW].action  # noqa: B018


def test_an_unknown_pooling_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"^pooling 'median' is not known.*; allowed: sum, mean, sqrtn, "):
        pooling_named("median")
    with pytest.raises(SpecError, match=r"^pooling 'average' is not known \(did you mean 'mean'\?\)"):
        pooling_named("average")
    for word in (word for pooling in POOLINGS.values() for word in pooling.synonyms):
        assert SYNONYMS[word] in POOLINGS


def test_a_specs_pooling_field_lists_all_poolings() -> None:
    field = json_schema()["properties"]["feature"]["items"]["properties"]["pooling"]
    assert field["description"] == MEANINGS and tuple(field["enum"]) == tuple(POOLINGS)


def test_only_concat_has_slots() -> None:
    assert FeatureSpec("f", "t", "concat", hotness=5).slots == 5
    assert not any(FeatureSpec("f", "t", name, hotness=5).slots for name in POOLINGS if name != "concat")  # type: ignore[arg-type]


def test_no_product_code_compares_names_of_poolings() -> None:
    """Product code asks `feature.kind`; a pooling's name is compared only with names of peers."""
    files = {path.resolve() for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")}
    assert len(files) > 200
    asking = {path for path in files if TESTED.search(path.read_text(encoding="utf-8"))}
    assert {path.relative_to(ROOT.resolve()).as_posix() for path in asking} <= set(PEERS)
