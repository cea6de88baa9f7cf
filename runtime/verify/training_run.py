"""A short training run that looks for trouble: whether two backends train alike shows in the bits it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.backends import backend_on, device_of
from embforge.codegen.spec import CollectionSpec
from embforge.collection import EmbeddingCollection
from embforge.torch_internals import sparse_indices, sparse_values
from embforge.training.rule_groups import Optimizers
from embforge.verify.cases import Case, Drawn, draw_batch

CASES = (
    Case(5, ids="zipf"),
    Case(3, ids="same"),
    Case(4, lengths="one"),
    Case(0),
    Case(6, lengths="none"),
    Case(5, ids="uniform", id_dtype="int32"),
    Case(10, lengths="edges", ids="zipf"),
    Case(7, weights="absent"),
    Case(9, lengths="edges", ids="same", id_dtype="int32"),
    Case(8, ids="zipf", bad_ids=True),
)
"""Duplicates inside a bag, across bags and features; one hot id; empty bags, an empty batch; runs around 64 and past
1000 occurrences; ids that are no rows, which count as absent."""


class Trained(NamedTuple):
    """What a run ends with: the module's state, and the gradients that others than the module got."""

    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def training_run(
    spec: CollectionSpec,
    optimizer: Optimizers,
    backend: str,
    *,
    steps: int,
    seed: int = 0,
    threads: int = 1,
    cases: Sequence[Case] = CASES,
    **more: Any,
) -> Trained:
    """`steps` steps with batches of these cases and gradients drawn from the seed, on that many threads.

    Rows start equal whatever the backend. Without an optimizer they stay, and their sparse gradients count. `more`
    goes to the module.
    """
    with _threads(threads):
        device = device_of(backend)
        module = EmbeddingCollection(spec, device, backend_on(device, backend), optimizer, bounds_check="zero", **more)
        generator = torch.Generator("cpu").manual_seed(seed)
        for table in spec.tables:
            rows = _normal((table.num_embeddings, table.embedding_dim), generator)
            with torch.no_grad():
                module.weight(table.name).copy_(rows.to(module.weight(table.name).dtype))
        if optimizer is not None:
            module.seed(seed)
        gradients: dict[str, Tensor] = {}
        for step in range(steps):
            drawn = draw_batch(spec, cases[step % len(cases)], seed * 1000 + step, device)
            gradients |= {f"{name}, step {step}": found for name, found in _step(module, drawn, generator).items()}
        return Trained({k: v.cpu() for k, v in module.state_dict().items()}, gradients)


def _step(module: EmbeddingCollection, drawn: Drawn, generator: torch.Generator) -> dict[str, Tensor]:
    weights = drawn.weights
    if weights is not None:
        weights = weights.nan_to_num(1.0, 1.0, 1.0).clone().requires_grad_()
    results = [r for r in module.forward_dict(drawn.values, drawn.offsets, weights).values() if r.requires_grad]
    incoming = [_normal(r.shape, generator).to(r.device, r.dtype) for r in results]
    torch.autograd.backward(results, incoming)
    module.check()
    found = {} if weights is None or weights.grad is None else {"gradient of weights": weights.grad.cpu()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"rows with a gradient of {name}"] = sparse_indices(parameter.grad).cpu()
            found[f"gradient of {name}"] = sparse_values(parameter.grad).cpu()
            parameter.grad = None
    return found


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def bits_of(tensor: Tensor) -> Tensor:
    """What two tensors of equal numbers have in common: their bytes, with one pattern for all NaNs."""
    # A copy, because a view of one number may keep a stride that no view of its bytes can have.
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    size = flat.element_size()
    numbers = flat.float() if flat.is_floating_point() else flat  # torch has no isnan for all formats
    return flat.view(torch.uint8).view(-1, size).masked_fill(numbers.isnan()[:, None], 0xFF)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
