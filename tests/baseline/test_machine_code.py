"""A digest of machine code changes with the code, but not with names or comments."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import embforge as ef
from baseline.code_cases import ONE_ARCH
from baseline.digests import digest_of
from baseline.internals import compile_text, kernel_plans, source_text
from baseline.machine_code import code_digest
from baseline.specs import ONE, RULES


def renamed_kernel(text: str, symbol: str) -> str:
    """The text with a name for the kernel so long that the symbol tables grow by a page of memory."""
    return text.replace(symbol, f"zz_{symbol}_" + "long_" * 1000)


def renamed_functions(text: str, symbol: str) -> str:
    names = re.findall(r"(?:struct|float|inline|bool|int64_t|uint32_t) ([a-z]\w{5,})\s*[({]", text)
    for name in sorted(set(names)):
        if symbol not in name and not name.endswith("_t"):
            text = re.sub(rf"\b{name}\b", f"q{name[::-1]}", text)
    return text


def more_comments(text: str, symbol: str) -> str:
    lines = (line + "  // a remark" if line.endswith(";") else line for line in text.splitlines())
    return "// another head\n\n\n" + "\n".join(lines) + "\n"


CHANGES: tuple[Callable[[str, str], str], ...] = (renamed_kernel, renamed_functions, more_comments)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_code_changes_a_digest_and_names_and_comments_do_not(target: str) -> None:
    if target == "cuda":
        pytest.importorskip("cuda.core")
    plan = kernel_plans(ONE, target, ONE_ARCH[target], RULES["sgd"])["backward"]
    text = source_text(plan)
    digest = code_digest(compile_text(plan, text))
    changed = text
    for change in CHANGES:
        before, changed = changed, change(changed, plan.symbol)
        assert changed != before
    assert code_digest(compile_text(plan, changed)) == digest
    wider = ef.CollectionSpec([ef.TableSpec("t", 40, 9, "bf16")], ONE.features, name="one")
    other = kernel_plans(wider, target, ONE_ARCH[target], RULES["sgd"])["backward"]
    assert code_digest(compile_text(other, source_text(other))) != digest


def test_digests_of_tensors_depend_on_every_bit_except_those_of_nans() -> None:
    zero, one = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert digest_of([zero]) == digest_of([zero.clone()]) != digest_of([one])
    assert digest_of([zero]) != digest_of([zero.reshape(1, 2)]) != digest_of([zero.to(torch.float64)])
    nans = torch.tensor([0x7FC00000, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert digest_of([nans]) == digest_of([torch.full((3,), torch.nan)])
    narrow = torch.tensor([0x7F, -1, 3], dtype=torch.int8).view(torch.float8_e4m3fn)
    assert digest_of([narrow]) == digest_of([torch.tensor([-1, 0x7F, 3], dtype=torch.int8).view(torch.float8_e4m3fn)])
