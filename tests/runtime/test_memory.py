"""The memory of large results is used again, but never while a reference to it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from embforge.memory import KEPT_BYTES, Results

ELEMENTS = KEPT_BYTES // 4


def test_a_dropped_result_is_used_again() -> None:
    results = Results(torch.float32)
    first = results.empty(2, ELEMENTS // 2)
    place = first.data_ptr()
    assert first.is_contiguous() and not first._is_view()
    del first
    assert results.empty(ELEMENTS, 1).data_ptr() == place


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda t: t,
    "view": lambda t: t[:1],
    "array": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "detached": lambda t: t.detach(),
    "other process": lambda t: t.share_memory_().shape,  # which may hold it without our knowing
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_held_result_is_left_alone(hold: str) -> None:
    results = Results(torch.float32)
    first = results.empty(ELEMENTS)
    held = HOLDERS[hold](first)
    place = first.data_ptr()
    del first
    second = results.empty(ELEMENTS)
    assert second.data_ptr() != place
    del held, second


def test_another_size_gets_its_own_block() -> None:
    results = Results(torch.float16)
    results.empty(2 * ELEMENTS)
    assert results.empty(3 * ELEMENTS).untyped_storage().nbytes() == 6 * ELEMENTS


def test_small_results_are_plain_tensors() -> None:
    results = Results(torch.bfloat16)
    assert results.empty(0, 5).shape == (0, 5)
    assert results.empty(3).dtype == torch.bfloat16


def test_a_loop_that_holds_its_last_result_needs_two_blocks() -> None:
    results = Results(torch.float32)
    places = set()
    held = results.empty(ELEMENTS)
    for _ in range(6):
        held = results.empty(ELEMENTS)
        places.add(held.data_ptr())
    assert len(places) == 2
