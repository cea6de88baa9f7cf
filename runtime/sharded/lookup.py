"""One call of a sharded collection as a function of autograd, with its forward and backward.

forward   model_forward ─► all2all ─► network_forward
backward  network_backward ─► all2all ─► `Owner.update` (sort, reduce, update)
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from embforge.autograd_calls import Context
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, readable
from embforge.sharded.replicas import KeptReplicas
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.weight_gradients import WeightGradients
from embforge.sharded.training import ShardedTraining
from embforge.training.calls import refuse_double_backward
from embforge.training.numbers import update_is_wanted


class KeptForward(NamedTuple):
    """What a forward keeps for its backward, in addition to the distributed batch."""

    updates: int
    """How often rows had been updated before the forward."""
    winners: Tensor | None
    """The winners of the lookup in this rank's own collection."""
    source_winners: Tensor | None
    """The partial pools that won, for features whose pooling selects."""
    rows: list[Tensor]
    """The received rows of features that are not pooled."""
    replicas: KeptReplicas | None


class _Context(Context, Protocol):
    """The context of autograd between forward and backward."""

    module: ShardedTraining
    distributed: Distributed
    kept: KeptForward


class ShardedLookup(torch.autograd.Function):
    """The function of autograd. `apply(module, distributed, weights, anchor)` returns the pooled result, then the rows
    of each feature that is not pooled."""

    @staticmethod
    def forward(
        ctx: _Context, module: ShardedTraining, distributed: Distributed, weights: Tensor | None, anchor: Tensor | None
    ) -> tuple[Tensor, ...]:
        keep = distributed.wants("trains")
        results, kept = run_forward(module, distributed, keep)
        ctx.module, ctx.distributed, ctx.kept = module, distributed, kept
        # The batch is saved too: torch raises if it has changed when the backward reads it again.
        pools = results[:1] if keep and distributed.wants("weight_gradient") else ()
        ctx.save_for_backward(distributed.input.values, distributed.input.offsets, *pools)
        return results

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, *grad_sequences: Tensor | None) -> Any:
        refuse_double_backward()
        pools = ctx.saved_tensors[2:]
        verdict, weight_gradient = run_backward(ctx.module, ctx.distributed, ctx.kept, grad, grad_sequences, pools)
        return None, None, weight_gradient if ctx.needs_input_grad[2] else None, verdict


def run_forward(
    module: ShardedTraining, distributed: Distributed, keep: bool
) -> tuple[tuple[Tensor, ...], KeptForward]:
    """Looks up a distributed batch. Returns the results, which are the pooled one and then the rows of each feature
    that is not pooled; and what the backward needs, if `keep` is set."""
    updates, pooled, sequence, winners = module.updates, None, None, None
    if module.owner is not None:
        assert distributed.local is not None  # a rank that holds rows gets ids
        pooled, sequence, _, winners = module.owner.forward(distributed.local, keep)
    received = module.vectors.to_samples(distributed, pooled, sequence)
    results = module.network.forward(distributed, received, keep)
    sequences, replicas = results.sequences, None
    if module.replicas is not None:
        own_sequences, replicas = module.replicas.forward(distributed, results.pooled, keep)
        sequences |= own_sequences
    kept = KeptForward(updates, winners, results.winners, received.rows, replicas)
    return (results.pooled, *(sequences[f] for f in sorted(sequences))), kept


def run_backward(
    module: ShardedTraining,
    distributed: Distributed,
    kept: KeptForward,
    grad: Tensor,
    grad_sequences: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None]:
    """Updates the rows of all ranks. Returns the verdict, which is infinite if gradients were not finite and nothing
    was updated, and the gradient of the weights, if any rank needs it."""
    numbers = module.trainer.numbers
    numbers.take_scale()
    # This must be the same on all ranks.
    trains = module.training_rows() and update_is_wanted(numbers.hyper)
    grad = readable(grad)
    grad_sequences = tuple(None if gradient is None else readable(gradient) for gradient in grad_sequences)
    by_feature = dict(zip(module.sequence_features, grad_sequences, strict=True))
    network, vectors, factor = module.network, module.vectors, module.gradient_factor
    if distributed.wants("weight_gradient"):
        module.check_rows(kept.updates)
    rows: list[Tensor] = []
    batch: Batch | None = None
    gradients: Gradients | None = None
    if network.sequence_spec is not None:
        batch = network.sequence_batch(distributed)
        gradients = network.sequence_gradients(distributed, grad, by_feature)
        rows = network.row_gradients(distributed, batch, gradients, kept.rows, factor)
        rows = [gradient.to(vectors.backward_wire.dtype) for gradient in rows]
    gradient_buffers = vectors.gradient_buffers(distributed)
    network.backward(distributed, grad, kept.source_winners, gradient_buffers, factor)
    verdict = torch.zeros(1, dtype=torch.float32, device=grad.device)
    if module.trainer.scales:
        # What is sent is checked too: a narrow format may overflow where the gradient does not.
        checked = [grad, *(g for g in grad_sequences if g is not None), *rows, gradient_buffers.partials]
        verdict = module.verdict(checked if gradient_buffers.own is None else [*checked, gradient_buffers.own])
        if not bool(verdict.isfinite()):
            if trains:
                module.after_backward(spoilt=True)
            return verdict, None
    pooled, sequence = vectors.to_owners(distributed, gradient_buffers, rows)
    local: Gradients | None = None
    if module.owner is not None:
        assert pooled is not None  # a rank that holds rows gets gradients
        local = Gradients(pooled, sequence, None, kept.winners)
    weight_gradient = None
    if distributed.wants("weight_gradient"):
        weights = WeightGradients(module.distributor.arrays, vectors.exchange, module.owner, network, factor)
        weight_gradient = weights.of_pools(distributed, grad, saved[0], local)
        if batch is not None and gradients is not None:
            weights.add_of_rows(weight_gradient, distributed, batch, gradients, kept.rows)
        if module.replicas is not None:
            assert kept.replicas is not None
            weight_gradient += module.replicas.weight_gradient(distributed, kept.replicas, grad, by_feature)
    if not trains:
        return verdict, weight_gradient
    if module.owner is not None:
        assert distributed.local is not None and local is not None
        module.owner.update(distributed.local, local)
    if module.replicas is not None:
        assert kept.replicas is not None
        module.replicas.backward(kept.replicas, grad, by_feature)
    module.after_backward(spoilt=False)
    return verdict, weight_gradient
