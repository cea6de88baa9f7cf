"""`import embforge` registers the operators with torch, in either order of imports, and does not disturb torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, directory: Path | None = None) -> str:
    """What the code prints in a new process, which finds a module `torch` in `directory` if that is not None."""
    path = {} if directory is None else {"PYTHONPATH": str(directory)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | path)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


CALL = """
import sys, warnings
warnings.simplefilter("error")
{imports}
unwanted = ("pydantic", "jinja2", "embforge.codegen", "embforge.operators.lookup")
assert not any(name.startswith(unwanted) for name in sys.modules)
assert "embforge.operators.torch_import" not in [type(finder).__module__ for finder in sys.meta_path]
assert vars(torch.__spec__.loader).keys() == {{"name", "path"}}
ids, weight = torch.tensor([1, 5]), torch.eye(3)
print(torch.ops.embforge.gather(ids, weight, -1).tolist(), torch.ops.embforge.lookup.default)
for name in [name for name in sys.modules if name.partition(".")[0] == "embforge"]:
    del sys.modules[name]
import embforge  # as in a notebook that imports it again
import embforge.functional
print(embforge.functional.embedding(ids, weight).tolist())
"""


@pytest.mark.parametrize("imports", ["import embforge\nimport torch", "import torch\nimport embforge"])
def test_operators_are_registered_in_either_order_of_imports(imports: str) -> None:
    rows = [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert run(CALL.format(imports=imports)) == f"{rows} embforge.lookup.default\n{rows}"


@pytest.fixture
def imitation(tmp_path: Path) -> Path:
    """A directory with a `torch` that fails at its first import and knows no operators."""
    code = "import sys\nsys.tries = getattr(sys, 'tries', 0) + 1\nif sys.tries == 1: raise OSError\nready = True\n"
    (tmp_path / "torch.py").write_text(code)
    return tmp_path


def test_a_torch_that_embforge_does_not_support_is_still_imported(imitation: Path) -> None:
    code = """
import warnings, sys
sys.tries = 1
import embforge
with warnings.catch_warnings(record=True) as caught:
    import torch
print(torch.ready, caught[0].message)
"""
    assert run(code, imitation).startswith("True embforge's operators are not registered with torch: AttributeError")


def test_registration_happens_once_and_only_by_an_import(imitation: Path) -> None:
    """Neither a search for torch nor a failed import does it, and two import hooks do not call each other forever."""
    code = """
import importlib.util, sys, threading
from embforge.operators.torch_import import when_torch_is_imported
ours = "embforge.operators.torch_import"
sys.meta_path[:] = [finder for finder in sys.meta_path if ours not in type(finder).__module__]
done = []
for name in "ab":
    when_torch_is_imported(lambda name=name: done.append((name, sys.modules["torch"].ready)))
assert importlib.util.find_spec("torch").origin.endswith("torch.py")
try: import torch
except OSError: print("failed", done)
threads = [threading.Thread(target=__import__, args=("torch",)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(done), sys.tries)
when_torch_is_imported(lambda: done.append("at once"))
print(done[-1], [finder for finder in sys.meta_path if "torch_import" in type(finder).__module__])
"""
    assert run(code, imitation) == "failed []\n[('a', True), ('b', True)] 2\nat once []"


def test_embforge_without_torch_generates_code() -> None:
    code = """
import sys, warnings
warnings.simplefilter("error")
sys.modules["torch"] = None  # as if it were not installed
import embforge
spec = embforge.CollectionSpec([embforge.TableSpec("t", 5, 4)], [embforge.FeatureSpec("f", "t")])
from embforge.codegen.build import source_of
from embforge.codegen.plan import Plan
print(len(source_of(Plan("forward", "cpu", "avx2", "int64", spec, embforge.CpuParams()))) > 1000)
"""
    assert run(code) == "True"
