"""A short training run on difficult batches. If two backends train equally, it ends with the same bits on both."""

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
"""Batches with duplicates within a bag and across bags and features, a single id that occurs everywhere, empty bags, no
samples, runs of about 64 and of more than 1000 occurrences, and ids that are not rows, which count as absent."""


class TrainingResult(NamedTuple):
    """The result of a training run."""

    state: dict[str, Tensor]
    """The state dict of the module after the last step."""
    gradients: dict[str, Tensor]
    """The gradients in each step: those of per-sample weights and, without a fused optimizer, those of tables."""


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
) -> TrainingResult:
    """Trains a module for some steps, with batches of these cases and gradients that are drawn from the seed.

    Rows start with the same numbers on every backend. Without an optimizer they do not change, and the result has their
    sparse gradients. `more`: other arguments of the module.
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
            gradients |= {f"{name}, step {step}": grad for name, grad in _step(module, drawn, generator).items()}
        return TrainingResult({k: v.cpu() for k, v in module.state_dict().items()}, gradients)


def _step(module: EmbeddingCollection, drawn: Drawn, generator: torch.Generator) -> dict[str, Tensor]:
    weights = drawn.weights
    if weights is not None:
        weights = weights.nan_to_num(1.0, 1.0, 1.0).clone().requires_grad_()
    results = [r for r in module.forward_dict(drawn.values, drawn.offsets, weights).values() if r.requires_grad]
    incoming = [_normal(r.shape, generator).to(r.device, r.dtype) for r in results]
    torch.autograd.backward(results, incoming)
    module.check()
    gradients = {} if weights is None or weights.grad is None else {"gradient of weights": weights.grad.cpu()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradients[f"rows with a gradient of {name}"] = sparse_indices(parameter.grad).cpu()
            gradients[f"gradient of {name}"] = sparse_values(parameter.grad).cpu()
            parameter.grad = None
    return gradients


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, with one pattern for all NaNs: tensors of equal numbers have equal bytes."""
    # A copy, because a view of one number may have a stride that a view of its bytes cannot have.
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
