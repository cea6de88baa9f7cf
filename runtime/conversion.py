"""Converts torch's own embedding modules to a spec, and refuses options that a collection does not have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.errors import SpecError
from embforge.codegen.poolings import EACH_ROW
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.number_formats import torch_dtype
from embforge.torch_internals import has_forward_hooks

DTYPE_NAMES = {torch_dtype(name): name for name in TABLE_DTYPES}
"""The name in a spec of each dtype of torch that tables may have."""


class Converted(NamedTuple):
    """The spec that is equivalent to some modules of torch."""

    spec: CollectionSpec
    weights: dict[str, Tensor]
    """The weights of the modules, by table."""
    sparse: frozenset[str]
    """The tables that have sparse gradients."""


def convert(modules: Mapping[str, nn.Module], weighted: Collection[str], output_dtype: str | None) -> Converted:
    """A spec with one feature per module, in the order of `modules`. Modules that share a weight share a table.

    `weighted`: the names of the features that have per-sample weights. `output_dtype`: None is the modules' own dtype
    if all have the same, and fp32 otherwise. Raises SpecError with the name of the module and the option that is
    refused.
    """
    if not isinstance(modules, Mapping | nn.ModuleDict):
        raise SpecError(
            f"from_modules: got a {type(modules).__name__}; pass a dict from feature names to nn.EmbeddingBag or "
            "nn.Embedding modules, such as {'user': model.user_bag}"
        )
    if not modules:
        raise SpecError("from_modules: the dict has no modules; pass at least one nn.EmbeddingBag or nn.Embedding")
    for name in weighted:
        if name not in modules:
            raise SpecError(f"from_modules: weighted names {name!r}; the modules are {', '.join(map(repr, modules))}")
    tables: dict[int, TableSpec] = {}
    weights: dict[str, Tensor] = {}
    features = []
    dense: set[str] = set()
    for name, module in modules.items():
        weight = _checked(name, module)
        if id(weight) not in tables:
            rows, dim = weight.shape
            tables[id(weight)] = TableSpec(name, rows, dim, DTYPE_NAMES[weight.dtype])  # type: ignore[arg-type]
            weights[name] = weight
        pooling: Any = module.mode if isinstance(module, nn.EmbeddingBag) else EACH_ROW
        padding: Any = module.padding_idx
        table = tables[id(weight)].name
        features.append(FeatureSpec(name, table, pooling, weighted=name in weighted, padding_idx=padding))
        if not module.sparse:  # the sum of gradients from several modules is dense if one of them is dense
            dense.add(table)
    spec = CollectionSpec(tuple(tables.values()), features, output_dtype or _common_dtype(tables.values()))  # type: ignore[arg-type]
    return Converted(spec, weights, frozenset(weights) - dense)


def common_device(weights: Mapping[str, Tensor]) -> torch.device:
    """The device of all weights. ValueError if they are on several devices."""
    devices = {name: weight.device for name, weight in weights.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name!r} on {device}" for name, device in devices.items())
        raise ValueError(f"from_modules: the modules are on several devices ({listed}); pass device=, or move them")
    return next(iter(devices.values()))


def _checked(name: str, module: nn.Module) -> Tensor:
    """The weight of a module. SpecError if the module cannot be converted."""
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise SpecError(
            f"from_modules: {name!r} is a {type(module).__name__}; allowed: nn.Embedding and nn.EmbeddingBag "
            "themselves, because a class derived from them may compute something else"
        )
    refused = {
        "max_norm": "rows are not scaled down when they are looked up; clip them in your training loop",
        "scale_grad_by_freq": "gradients are not divided by how often an id occurs",
    }
    for option, reason in refused.items():
        value = getattr(module, option)
        if value:
            raise SpecError(f"from_modules: {name!r} has {option}={value!r}, which cannot be kept: {reason}")
    if has_forward_hooks(module):
        raise SpecError(f"from_modules: {name!r} has forward hooks, which would not run; remove them")
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.dtype not in DTYPE_NAMES:
        allowed = ", ".join(map(str, DTYPE_NAMES))
        raise SpecError(f"from_modules: {name!r} has rows of {weight.dtype}; allowed: {allowed}; convert it with .to()")
    return weight


def _common_dtype(tables: Collection[TableSpec]) -> str:
    dtypes = {table.dtype for table in tables}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(OUTPUT_DTYPES) else "fp32"
