"""The layout of pickled modules. A pickle of another layout is refused, because it would fail later, in the first call.

A pickled module is its attributes, under names that change between versions, so it belongs to the version that wrote
it. State dicts are what later versions load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

LAYOUT = 1
"""Add 1 when attributes that are pickled get other names or meanings."""
_KEY = "pickle_layout"


def with_layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an object as `__getstate__` returns it, with the number of the layout."""
    return {**state, _KEY: LAYOUT}


def without_layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `with_layout` got. UnpicklingError if it has another layout, or none."""
    if state.get(_KEY) != LAYOUT:
        raise UnpicklingError(
            "this module was pickled by another version of embforge, and a whole module can be unpickled only by the "
            "version that pickled it: load the pickle there, save module.state_dict(), and load that here into a "
            "module of the same spec"
        )
    return {name: value for name, value in state.items() if name != _KEY}
