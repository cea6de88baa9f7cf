"""A pytest plugin: the suites of static tables run with every table remapped, and expect what they always expect.

    cd tests && python -m pytest -p conformance.remapped_tables conformance

Every module is made with `remap` for all of its tables: an id for each row, the one after it. Tests give rows, and
just before a module's own step turns ids into rows, each row is replaced by the id that stands for it. What is no row
stays as it is, and is no id either. So rows, states, gradients, results and errors are those of static tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec, FeatureSpec
from embforge.collection import EmbeddingCollection
from embforge.id_resolution import ResolveStep
from embforge.inputs import Batch

NO_MODULE = "runs kernels without a module: rows are all that they know"
ENTRIES = "lists what a state dict or a module's buffers hold, which includes the entries of remaps"
META = "goes by the meta device, where entries are lost: they must be given again"
AFTERWARDS = "makes ids wrong after the lookup: the backward has rows of its own"
BEYOND = {
    "test_remapped.py": "is about remapped tables",
    "test_remapped_suites.py": "starts this",
    "test_unknown_entries.py": "is about remapped tables",
    "test_bits.py": NO_MODULE,
    "test_stages.py": NO_MODULE,
    "test_module.py::test_a_state_dict_restores_all_tables": ENTRIES,
    "test_training_state.py::test_keys_and_shapes": ENTRIES,
    "test_training_state.py::test_fused_tables_are_neither_parameters_nor_buffers": ENTRIES,
    "test_training_state.py::test_tables_whose_keys_would_collide_are_refused": ENTRIES,
    "test_training_state.py::test_the_optimizer_follows_the_module": META,
    "test_training_state.py::test_modules_on_meta_train_after_a_move": META,
    "test_training_dense.py::test_copies_pickles_and_moves_keep_the_kind_of_gradients": META,
    "test_training_errors.py::test_a_bad_id_changes_nothing[": AFTERWARDS,
    "test_training_by_table.py::test_a_bad_id_in_one_table_changes_nothing_in_any": AFTERWARDS,
    "test_training_api.py::test_explain_names_all_that_training_runs": "expects a line that here has one more entry",
}
"""What the suites ask of static tables alone, by file or test, and why."""


def remapped(spec: CollectionSpec) -> CollectionSpec:
    """The spec with every table remapped, and with the padding ids that stand for its padding rows."""
    if spec.has_remaps:
        return spec

    def by_ids(feature: FeatureSpec) -> FeatureSpec:
        padding, rows = feature.padding_idx, spec.table(feature.table).num_embeddings
        known = padding is not None and 0 <= padding < rows
        return replace(feature, padding_idx=(padding + 1) % rows) if known else feature

    return replace(
        spec,
        tables=tuple(replace(table, remap=table.num_embeddings) for table in spec.tables),
        features=tuple(map(by_ids, spec.features)),
    )


def ids_of(spec: CollectionSpec, batch: Batch) -> Tensor:
    """The ids that stand for the rows of a batch."""
    values, offsets = batch.values, batch.offsets
    sizes = [spec.table(feature.table).num_embeddings for feature in spec.features]
    places = torch.arange(values.numel(), dtype=offsets.dtype, device=values.device)
    bags = torch.searchsorted(offsets.contiguous(), places, right=True) - 1
    features = (bags // max(batch.batch, 1)).clamp(0, len(sizes) - 1)  # offsets may be wrong
    rows = torch.tensor(sizes, device=values.device)[features]
    return torch.where((values >= 0) & (values < rows), (values + 1) % rows, values).to(values.dtype)


def _made_remapped(init: Any) -> Any:
    def wrapped(module: EmbeddingCollection, spec: Any, *arguments: Any, **options: Any) -> None:
        init(module, remapped(spec) if isinstance(spec, CollectionSpec) else spec, *arguments, **options)
        for name, remap in module.remaps().items():
            if not remap.entries.is_meta:
                module.set_remap(name, torch.arange(remap.table.num_ids, device="cpu").roll(1))

    return wrapped


def _given_rows(call: Any) -> Any:
    def wrapped(step: ResolveStep, batch: Batch) -> Batch:
        found: Batch = call(step, batch._replace(values=ids_of(step.spec, batch)))
        return found

    return wrapped


@contextmanager
def every_table_remapped() -> Iterator[None]:
    """In the block, modules are made with remapped tables and are called with rows."""
    with ExitStack() as stack:
        for patched, method, seam in (
            (EmbeddingCollection, "__init__", _made_remapped),
            (ResolveStep, "__call__", _given_rows),
        ):
            stack.enter_context(mock.patch.object(patched, method, seam(getattr(patched, method))))
        yield


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(every_table_remapped())
    config.add_cleanup(stack.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is `BEYOND`."""
    beyond = [item for item in items if any(name in item.nodeid for name in BEYOND)]
    config.hook.pytest_deselected(items=beyond)
    items[:] = [item for item in items if item not in beyond]
