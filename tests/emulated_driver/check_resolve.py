"""The step that turns ids into rows on an emulated device: its launch, and what the host learns of unknown ids."""

from __future__ import annotations

import pytest
import torch
from conformance.training import WITH_ROWS
from support.remaps import entries_of, ids_for, remapped
from torch import Tensor

import embforge as ef
from embforge.verify.cases import Case, draw_batch

REMAPPED = remapped(WITH_ROWS, ["a"])
"""As in conformance/test_remapped.py, so that kernels are compiled once for both."""
ENTRIES = entries_of(REMAPPED)


def made(device: str) -> ef.EmbeddingCollection:
    torch.manual_seed(3)
    module = ef.EmbeddingCollection(REMAPPED, "cpu", "reference", optimizer=ef.optim.Adam(lr=0.1), remap=ENTRIES)
    if device == "cpu":
        return module
    there = ef.EmbeddingCollection(REMAPPED, device, optimizer=ef.optim.Adam(lr=0.1))
    there.load_state_dict(module.state_dict())
    return there


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    values, offsets, _ = draw_batch(WITH_ROWS, Case(6), seed)
    return ids_for(REMAPPED, ENTRIES, values, offsets, seed), offsets


def trained(module: ef.EmbeddingCollection, values: Tensor, offsets: Tensor) -> list[Tensor]:
    results = list(module.forward_dict(values.to(module.device), offsets.to(module.device)).values())
    torch.autograd.backward(results, [torch.ones(r.shape).to(module.device) for r in results])
    return [result.detach().cpu() for result in results]


def test_ids_become_rows_on_the_device() -> None:
    there, here = made("cuda"), made("cpu")
    for seed in range(2):
        for got, want in zip(trained(there, *batch_of(seed)), trained(here, *batch_of(seed)), strict=True):
            assert torch.equal(got, want)
    there.check()
    found, wanted = ({k: v.cpu() for k, v in module.state_dict().items()} for module in (there, here))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_an_unknown_id_is_reported_later_and_trains_nothing() -> None:
    module = made("cuda")
    before = {name: entry.cpu() for name, entry in module.state_dict().items()}
    for wrong in (123, -9):
        values, offsets = batch_of(1)
        values[0] = wrong
        trained(module, values, offsets)
        for _ in range(2):  # the lookup tells of it, and the backward
            with pytest.raises(
                IndexError, match=f"id {wrong} of sample .* is not an id of table 'a'; allowed: 0 to 122"
            ):
                module.check()
        module.check()
    after = {name: entry.cpu() for name, entry in module.state_dict().items()}
    assert all(torch.equal(after[name], before[name]) for name in before)
