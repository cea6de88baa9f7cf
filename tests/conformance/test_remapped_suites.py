"""Remapped tables pass the suites of static ones: `remapped_tables.py` runs these with every table remapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance import test_module, test_training_autograd, test_training_by_table, test_training_dense
from conformance.backends import collection
from conformance.remapped_tables import BEYOND, every_table_remapped
from conformance.training import trained

HERE = Path(__file__).parent
PLUGIN = ("-p", "conformance.remapped_tables", "-p", "no:cacheprovider")
FEW = [
    test_module.test_sequence_features_have_one_row_per_id,
    test_module.test_every_form_of_input_gives_the_same_result,
    test_module.test_a_deepcopy_shares_no_memory,
    test_module.test_a_module_saved_by_torch_gives_the_same_results,
    test_module.test_a_module_moves_to_meta_and_back,
    test_training_autograd.test_the_backward_pass_updates,
    test_training_by_table.test_frozen_tables_are_not_trained,
    test_training_dense.test_dense_gradients_are_the_sparse_ones,
]
"""Tests that a wrong row would fail: results compared with rows, forms of input, copies, training."""


def test_every_table_is_remapped() -> None:
    with every_table_remapped():
        for module in (collection(test_module.MIXED, "reference"), trained()):
            assert module.remaps().keys() == {table.name for table in module.spec.tables}
            assert all(not (remap.entries == remap.entries.sort().values).any() for remap in module.remaps().values())
    assert not trained().remaps()


@pytest.mark.parametrize("test", FEW, ids=lambda test: test.__name__)
def test_a_few(test: Any) -> None:
    with every_table_remapped():
        test("reference")


def test_each_exception_is_one() -> None:
    """It names a test, or a file of them."""
    for name in BEYOND:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (HERE / file).read_text(encoding="utf-8"), name


@pytest.mark.soak
def test_all() -> None:
    words = ("-q", "--tb=short", *PLUGIN, "-m", "not soak", "conformance")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
