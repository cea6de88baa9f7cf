"""Every tensor that the runtime makes names its dtype and device: torch's defaults belong to the user.

Under `torch.set_default_dtype(torch.bfloat16)` a buffer without a dtype is half of what a kernel writes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "runtime"
MAKERS = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""Functions of torch that make a tensor of the default dtype (or one that follows from a value) on the default device,
unless both are said. `*_like` and `new_*` take them from a tensor."""


def _faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch" or name not in MAKERS:
            continue
        said = {keyword.arg for keyword in node.keywords}
        missing = [argument for argument in ("dtype", "device") if argument not in said]
        if missing:
            yield f"line {node.lineno}: torch.{name} without {' and '.join(missing)}"


@pytest.mark.parametrize("path", sorted(RUNTIME.rglob("*.py")), ids=lambda path: str(path.relative_to(RUNTIME)))
def test_every_allocation_names_its_dtype_and_device(path: Path) -> None:
    assert list(_faults(ast.parse(path.read_text(encoding="utf-8")))) == []
