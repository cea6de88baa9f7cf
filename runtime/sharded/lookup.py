"""One call of a sharded collection, forward and backward, as autograd sees it.

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
    """What a forward keeps for its backward, beside the batch and how it was distributed."""

    updates: int
    """How often rows had been updated before it."""
    winners: Tensor | None
    """As the lookup of this rank's own collection kept them."""
    source_winners: Tensor | None
    """Where partial pools are selected: which of them won."""
    rows: list[Tensor]
    """The rows that came for features that are not pooled."""
    replicas: KeptReplicas | None


class _Context(Context, Protocol):
    """What a forward keeps for its backward."""

    module: ShardedTraining
    done: Distributed
    kept: KeptForward


class ShardedLookup(torch.autograd.Function):
    """`apply(module, done, weights, anchor)` -> pooled, then the rows of every feature that is not pooled."""

    @staticmethod
    def forward(
        ctx: _Context, module: ShardedTraining, done: Distributed, weights: Tensor | None, anchor: Tensor | None
    ) -> tuple[Tensor, ...]:
        keep = done.wants("trains")
        results, kept = run_forward(module, done, keep)
        ctx.module, ctx.done, ctx.kept = module, done, kept
        # The batch too: torch raises if it has changed when the backward reads it again.
        pools = results[:1] if keep and done.wants("weight_gradient") else ()
        ctx.save_for_backward(done.given.values, done.given.offsets, *pools)
        return results

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, *grad_sequences: Tensor | None) -> Any:
        refuse_double_backward()
        pools = ctx.saved_tensors[2:]
        verdict, weight_gradient = run_backward(ctx.module, ctx.done, ctx.kept, grad, grad_sequences, pools)
        return None, None, weight_gradient if ctx.needs_input_grad[2] else None, verdict


def run_forward(module: ShardedTraining, done: Distributed, keep: bool) -> tuple[tuple[Tensor, ...], KeptForward]:
    """Pooled, then the rows of every feature that is not pooled; and what a backward needs, if `keep` says that one
    will come."""
    updates, pooled, sequence, winners = module.updates, None, None, None
    if module.owner is not None:
        assert done.local is not None  # a rank that holds rows gets ids
        pooled, sequence, _, winners = module.owner.forward(done.local, keep)
    arrived = module.vectors.to_samples(done, pooled, sequence)
    results = module.network.forward(done, arrived, keep)
    sequences, replicas = results.sequences, None
    if module.replicas is not None:
        own_sequences, replicas = module.replicas.forward(done, results.pooled, keep)
        sequences |= own_sequences
    kept = KeptForward(updates, winners, results.winners, arrived.rows, replicas)
    return (results.pooled, *(sequences[f] for f in sorted(sequences))), kept


def run_backward(
    module: ShardedTraining,
    done: Distributed,
    kept: KeptForward,
    grad: Tensor,
    grad_sequences: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None]:
    """Updates rows everywhere. The verdict (infinite: gradients were not finite, nothing was updated), and the gradient
    of the given weights, if any rank wants that."""
    numbers = module.trainer.numbers
    numbers.take_scale()
    # All ranks must ask for the same gradients.
    trains = module.training_rows() and update_is_wanted(numbers.hyper)
    grad = readable(grad)
    grad_sequences = tuple(None if one is None else readable(one) for one in grad_sequences)
    given = dict(zip(module.sequence_features, grad_sequences, strict=True))
    network, vectors, factor = module.network, module.vectors, module.gradient_factor
    if done.wants("weight_gradient"):
        module.check_rows(kept.updates)
    rows: list[Tensor] = []
    batch: Batch | None = None
    gradients: Gradients | None = None
    if network.sequence_spec is not None:
        batch = network.sequence_batch(done)
        gradients = network.sequence_gradients(done, grad, given)
        rows = network.row_gradients(done, batch, gradients, kept.rows, factor)
        rows = [part.to(vectors.backward_wire.dtype) for part in rows]
    room = vectors.room(done)
    network.backward(done, grad, kept.source_winners, room, factor)
    verdict = torch.zeros(1, dtype=torch.float32, device=grad.device)
    if module.trainer.scales:
        # What is looked at is what travels: a narrow format may overflow where the gradient does not.
        looked_at = [grad, *(g for g in grad_sequences if g is not None), *rows, room.partials]
        verdict = module.verdict(looked_at if room.own is None else [*looked_at, room.own])
        if not bool(verdict.isfinite()):
            if trains:
                module.after_backward(spoilt=True)
            return verdict, None
    pooled, sequence = vectors.to_owners(done, room, rows)
    local: Gradients | None = None
    if module.owner is not None:
        assert pooled is not None  # a rank that holds rows gets gradients
        local = Gradients(pooled, sequence, None, kept.winners)
    weight_gradient = None
    if done.wants("weight_gradient"):
        weights = WeightGradients(module.distributor.wiring, vectors.exchange, module.owner, network, factor)
        weight_gradient = weights.of_pools(done, grad, saved[0], local)
        if batch is not None and gradients is not None:
            weights.add_of_rows(weight_gradient, done, batch, gradients, kept.rows)
        if module.replicas is not None:
            assert kept.replicas is not None
            weight_gradient += module.replicas.weight_gradient(done, kept.replicas, grad, given)
    if not trains:
        return verdict, weight_gradient
    if module.owner is not None:
        assert done.local is not None and local is not None
        module.owner.update(done.local, local)
    if module.replicas is not None:
        assert kept.replicas is not None
        module.replicas.backward(kept.replicas, grad, given)
    module.after_backward(spoilt=False)
    return verdict, weight_gradient
