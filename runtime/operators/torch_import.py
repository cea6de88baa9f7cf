"""Runs a function as soon as torch is imported, without importing torch."""

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
    """Calls `action` now if torch is imported, or at the end of torch's import, in the thread that imports it.

    `action` must not raise, because the import of torch would fail with it.
    """
    finder = _TorchFinder(action)
    sys.meta_path.insert(0, finder)  # before sys.modules is read, because another thread may start to import torch
    if sys.modules.get(TORCH) is not None:  # an entry None means that importing torch is forbidden
        sys.meta_path.remove(finder)
        action()


class _TorchFinder:
    """The first finder of `sys.meta_path`, which removes itself once torch is imported.

    It finds torch by the other finders and adds a last step to that one import. Torch's module, spec and loader are the
    same as without it.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The spec of torch that a later finder has, if `name` is torch; otherwise None, so that Python asks the
        others."""
        if name != TORCH or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # Python has asked the earlier ones
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Loader) -> None:
        """Adds the last step to this loader. A caller that only asks for the spec never runs it."""
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._action()

        vars(loader)["exec_module"] = execute_and_act
