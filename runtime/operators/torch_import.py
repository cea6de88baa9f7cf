"""Something to do as soon as torch is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader

TORCH = "torch"


def when_torch_is_imported(action: Callable[[], None]) -> None:
    """Calls `action` now if torch is imported, else at the end of its import, in the thread that imports it.

    `action` must not raise: the import of torch would fail with it.
    """
    finder = _TorchFinder(action)
    sys.meta_path.insert(0, finder)  # before the look at sys.modules: another thread may begin to import torch
    if sys.modules.get(TORCH) is not None:  # None: somebody forbids it
        sys.meta_path.remove(finder)
        action()


class _TorchFinder:
    """Stands before the finders of `sys.meta_path`, and leaves it once torch is imported.

    It finds torch as the others do and adds a last step to that one import. Torch's module, spec and loader are what
    they would be without it.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The spec of torch if `name` is torch and somebody has it, else None: the others are asked."""
        if name != TORCH or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # earlier ones have been asked
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Loader) -> None:
        """Adds the last step to this loader object; a caller who only asked where torch is never runs it."""
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._action()

        vars(loader)["exec_module"] = execute_and_act
