"""Tables without a fused optimizer whose gradients are dense, for optimizers and wrappers that take no sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from conformance.backends import every_backend
from conformance.test_training_bits import OUTPUTS, spec_of
from conformance.training import ONE, SPEC, WITH_ROWS, draw, sgd, trained
from torch import Tensor, nn

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection

PADDED = CollectionSpec([TableSpec("t", 9, 15)], [FeatureSpec("f", "t")])
"""Rows have 15 numbers and start 16 numbers apart."""
BATCH = torch.tensor([1, 4, 4, 7, 0, 1]), torch.tensor([0, 2, 5, 5, 6])


def backward(module: EmbeddingCollection, batch: Any) -> Tensor | None:
    """Runs one backward pass with different numbers for all results, and returns the gradient of the weights."""
    values, offsets, weights = batch
    weights = None if weights is None else weights.nan_to_num(1.0, 1.0, 1.0).clone().requires_grad_()
    results = [result for result in module.forward_dict(values, offsets, weights).values() if result.requires_grad]
    torch.autograd.backward(results, [result.detach().float().add(1.0).square().to(result.dtype) for result in results])
    return None if weights is None else weights.grad


def assert_dense_twins(sparse: EmbeddingCollection, dense: EmbeddingCollection) -> None:
    """Asserts that the gradients of `dense` have the bits of those of `sparse`, and the strides of their parameters."""
    for name, parameter in dense.named_parameters():
        ours, theirs = parameter.grad, sparse.get_parameter(name).grad
        assert (ours is None) == (theirs is None) == (parameter.dtype.itemsize == 1)
        if ours is not None and theirs is not None:
            assert ours.layout == torch.strided and ours.is_contiguous() and ours.dtype == parameter.dtype
            assert theirs.is_sparse and torch.equal(ours, theirs.to_dense())
            assert ours.any()


@every_backend
def test_dense_gradients_are_the_sparse_ones(backend: Any) -> None:
    sparse, dense = (trained(backend, WITH_ROWS, optimizer=None, sparse=sparse) for sparse in (True, False))
    batch = draw(backend, spec=WITH_ROWS)
    ours, theirs = backward(dense, batch), backward(sparse, batch)
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    assert_dense_twins(sparse, dense)


@pytest.mark.parametrize("turn", range(len(OUTPUTS)))
def test_dense_gradients_of_every_pooling_and_dtype(turn: int) -> None:
    sparse, dense = (trained(spec=spec_of(turn), optimizer=None, sparse=sparse) for sparse in (True, False))
    batch = draw(spec=spec_of(turn), size=9)
    backward(dense, batch)
    backward(sparse, batch)
    assert_dense_twins(sparse, dense)


# ---- What takes dense gradients only ---------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD with all": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "Adagrad with decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
}


def twins() -> tuple[EmbeddingCollection, nn.EmbeddingBag]:
    """The same table in our module, with gaps between rows, and in torch's."""
    module, bag = trained(spec=PADDED, optimizer=None, sparse=False), nn.EmbeddingBag(9, 15, include_last_offset=True)
    bag.mode = "sum"
    with torch.no_grad():
        bag.weight.copy_(module.weight("t"))
    assert not module.weight("t").is_contiguous()
    return module, bag


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping_work_as_with_torchs_own_table(name: str) -> None:
    module, bag = twins()
    for model in (module, bag):
        optimizer, scaler = OPTIMIZERS[name](model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            scaler.scale(model(*BATCH).pow(2).sum() * (torch.inf if step == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
            assert norm > 0.5 or step == 2
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
    torch.testing.assert_close(module.weight("t"), bag.weight, rtol=1e-4, atol=1e-5)
    assert (module.weight("t").as_strided((9, 16), (16, 1))[:8, 15] == 0).all()


@pytest.mark.parametrize("copied", [False, True])
def test_torchs_fused_kernels_are_kept_from_rows_with_gaps(copied: bool) -> None:
    """These kernels would assume contiguous memory and silently train other rows."""
    module = deepcopy(twins()[0]) if copied else twins()[0]
    module(*BATCH).sum().backward()
    before = module.weight("t").detach().clone()
    for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        with pytest.raises(RuntimeError, match=rf"{kind.__name__}\(fused=True\) cannot train .*16 elements apart"):
            kind(module.parameters(), lr=0.1, fused=True).step()  # type: ignore[call-arg]
    assert torch.equal(module.weight("t"), before)
    dense = trained(spec=ONE, optimizer=None, sparse=False)  # whose rows have no gaps
    dense(*BATCH).sum().backward()
    before, gradient = dense.weight("t").detach().clone(), dense.weight("t").grad
    assert gradient is not None
    torch.optim.SGD(dense.parameters(), lr=0.5, fused=True).step()
    torch.testing.assert_close(dense.weight("t").detach(), before - 0.5 * gradient)


def test_gradients_of_two_passes_add_up_in_place() -> None:
    module = trained(optimizer=None, sparse=False)
    module(*draw()).sum().backward()
    first = {name: parameter.grad for name, parameter in module.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in first.items() if gradient is not None}
    module(*draw()).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is first[name]
        torch.testing.assert_close(parameter.grad, copies[name] * 2)


# ---- The option ------------------------------------------------------------------------------------------


def test_tables_may_have_different_kinds_of_gradients() -> None:
    module = trained(optimizer=None, sparse=["b"])
    assert "dense gradients: a, " not in repr(module) and "dense gradients: a" in repr(module)
    module(*draw()).sum().backward()
    of_a, of_b = module.weight("a").grad, module.weight("b").grad
    assert of_a is not None and of_b is not None and not of_a.is_sparse and of_b.is_sparse and of_b.is_coalesced()
    assert "dense" not in repr(trained(optimizer=None)) and "dense" not in repr(trained())


def test_copies_pickles_and_moves_keep_the_kind_of_gradients() -> None:
    module = deepcopy(trained(optimizer=None, sparse=False)).to("meta").to_empty(device="cpu")
    module.reset_parameters()
    module.freeze()
    module.unfreeze()
    module(*draw()).sum().backward()
    assert all(p.grad is not None and not p.grad.is_sparse for p in module.parameters())


@pytest.mark.parametrize("sparse", [True, False, ["a"]])
def test_a_fused_optimizer_makes_no_gradients(sparse: Any) -> None:
    with pytest.raises(ValueError, match=r"sparse=.* goes with optimizer=None only: a fused optimizer updates rows"):
        trained(sparse=sparse, **sgd())


@pytest.mark.parametrize(("sparse", "kind"), [("a", TypeError), (1, TypeError), (["a", "c"], ValueError)])
def test_other_values_of_sparse_are_refused(sparse: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="allowed: True, False, or a list of names among 'a', 'b'"):
        EmbeddingCollection(SPEC, backend="reference", sparse=sparse)


def test_the_modules_own_clipping_names_torchs() -> None:
    with pytest.raises(RuntimeError, match=r"sparse=False and call torch\.nn\.utils\.clip_grad_norm_"):
        trained(optimizer=None).clip_grad_norm_(1.0)


def test_an_fp8_table_has_no_dense_gradient_either() -> None:
    spec = CollectionSpec([TableSpec("q", 9, 8, "fp8_e4m3")], [FeatureSpec("f", "q")])
    module = trained(spec=spec, optimizer=None, sparse=False)
    assert not module(*BATCH).requires_grad
    module.weight("q").requires_grad_()
    with pytest.raises(TypeError, match=r"an fp8 table cannot be trained by torch\.optim"):
        module(*BATCH).sum().backward()
