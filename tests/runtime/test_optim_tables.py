"""The tables that list the built-in optimizers have the same entries, so that none of them lacks an optimizer."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import torch

from embforge import optim
from embforge.codegen import plans
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Rule
from embforge.training.param_groups import PAIRS
from embforge.verify import training

CLASSES: dict[str, type[optim.Optimizer]] = {
    name: value
    for name, value in vars(optim).items()
    if inspect.isclass(value) and issubclass(value, optim.Optimizer) and not name.startswith("_")
}
"""All optimizers that `runtime/optim.py` defines, with the base class and the class of users' rules."""
BUILT_IN = {name: cls for name, cls in CLASSES.items() if cls not in (optim.Optimizer, optim.Custom)}


ROOT = Path(__file__).parents[2]
NUMBERS = {11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}
PAGES = {"README.md": 1, "docs/custom_rules.md": 1, "docs/evidence.md": 2}
"""How often pages say how many built-in optimizers there are."""


def rule_name(cls: type[optim.Optimizer]) -> str:
    return cls().update.rule.name


def test_every_class_is_exported() -> None:
    assert CLASSES.keys() == {name for name in optim.__all__ if name[0].isupper()} - {"CustomRule"}


def test_every_rule_has_a_class_and_a_name_on_the_command_line() -> None:
    written = {
        name
        for name, value in vars(builtin).items()
        if inspect.isfunction(value) and value.__module__ == builtin.__name__
    }
    assert plans.RULES.keys() == written - {"with_options"}
    assert plans.RULES.keys() == {rule_name(cls) for cls in BUILT_IN.values()}
    assert {rule_name(cls): cls for cls in BUILT_IN.values()} == training.CLASSES


def test_rules_and_classes_agree() -> None:
    for name, make in plans.RULES.items():
        rule: Rule = make()
        assert rule.name == name
        assert training.CLASSES[name]().update.rule == rule, name


def test_rules_with_their_own_decay_are_those_of_the_classes() -> None:
    refusing = {name for name, cls in training.CLASSES.items() if issubclass(cls, optim._WithOwnDecay)}
    assert plans.OWN_DECAY.keys() == refusing


def test_every_modifier_has_arguments_that_exist() -> None:
    assert training.OPTIONS.keys() == set(plans.MODIFIERS)
    for arguments in training.OPTIONS.values():
        assert arguments.keys() <= set(optim.OPTIONS)


def test_options_are_the_arguments_of_every_optimizer() -> None:
    assert {field.name for field in fields(optim.Optimizer)} == set(optim.OPTIONS)
    assert set(inspect.signature(optim.CustomRule.__call__).parameters) - {"self", "hyper"} == set(optim.OPTIONS)


def test_tables_of_numbers_name_numbers_that_rules_have() -> None:
    numbers = {number for cls in BUILT_IN.values() for number in cls().update.rule.hyper}
    assert set(optim._FRACTIONS) <= numbers
    assert {number for pair in PAIRS.values() for number in pair} <= numbers


def test_names_of_torch_that_are_explained_are_names_of_torch_only() -> None:
    for name, spelling in optim.TORCH_NAMES.items():
        assert hasattr(torch.optim, name) and name not in CLASSES
        assert spelling.partition("(")[0] in BUILT_IN


def test_pages_say_how_many_there_are() -> None:
    for page, times in PAGES.items():
        words = (ROOT / page).read_text(encoding="utf-8").lower().split()
        assert words.count(NUMBERS[len(BUILT_IN)]) == times, page
