"""One call of a sharded collection, forward and backward, as autograd sees it.

forward   model_forward ─► all2all ─► network_forward
backward  network_backward ─► all2all ─► local_reduce (sort, reduce, update)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embforge.launch.gradients import Gradients, readable
from embforge.sharded.stages.data_distributor import Distributed
from embforge.training.calls import refuse_double_backward


class ShardedLookup(torch.autograd.Function):
    """`apply(module, done, weights, anchor)` -> pooled, then the rows of every feature that is not pooled."""

    @staticmethod
    def forward(ctx: Any, module: Any, done: Distributed, weights: Tensor | None, anchor: Tensor | None) -> Any:
        keep = done.wants("trains")
        pooled, sequences, kept = run_forward(module, done, keep)
        ctx.module, ctx.done, ctx.kept = module, done, kept
        # The batch too: torch raises if it has changed when the backward reads it again.
        pools = [pooled] if keep and done.wants("weight_gradient") else []
        ctx.save_for_backward(done.given.values, done.given.offsets, *pools)
        return pooled, *sequences

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_sequences: Tensor | None) -> Any:
        refuse_double_backward()
        pools = ctx.saved_tensors[2:]
        verdict, weight_gradient = run_backward(ctx.module, ctx.done, ctx.kept, grad, grad_sequences, pools)
        return None, None, weight_gradient if ctx.needs_input_grad[2] else None, verdict


def run_forward(module: Any, done: Distributed, keep: bool) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Pooled, the rows of features that are not pooled, and what a backward needs."""
    kept: dict[str, Any] = {"updates": module.updates}
    pooled = sequence = None
    if module.owner is not None:
        found = module.owner.forward(done.local, keep)
        pooled, sequence = found.pooled, found.sequence
        kept["winners"] = found.winners
    arrived = module.vectors.to_samples(done, pooled, sequence)
    results = module.network.forward(done, arrived, keep)
    kept |= {"source_winners": results.winners, "rows": arrived.rows}
    sequences = results.sequences
    if module.replicas is not None:
        sequences |= module.replicas.forward(done, results.pooled, keep, kept)
    return results.pooled, [sequences[f] for f in sorted(sequences)], kept


def run_backward(
    module: Any,
    done: Distributed,
    kept: dict[str, Any],
    grad: Tensor,
    grad_sequences: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None]:
    """Updates rows everywhere. The verdict (infinite: gradients were not finite, nothing was updated), and the
    gradient of
    the given weights, if any rank wants that."""
    module.take_scale()
    trains = module.training_rows() and module.update_is_wanted()
    grad = readable(grad)
    grad_sequences = tuple(None if one is None else readable(one) for one in grad_sequences)
    given = dict(zip(module.sequence_features, grad_sequences, strict=True))
    network, vectors, factor = module.network, module.vectors, module.gradient_factor
    if done.wants("weight_gradient"):
        module.check_rows(kept["updates"])
    rows: list[Tensor] = []
    batch = gradients = None
    if network.sequence_spec is not None:
        batch = network.sequence_batch(done)
        gradients = network.sequence_gradients(done, grad, given)
        rows = network.row_gradients(done, batch, gradients, kept["rows"], factor)
        rows = [part.to(vectors.backward_wire.dtype) for part in rows]
    room = vectors.room(done)
    network.backward(done, grad, kept["source_winners"], room, factor)
    verdict = torch.zeros(1, dtype=torch.float32, device=grad.device)
    if module.scales:
        # What is looked at is what travels: a narrow format may overflow where the gradient does not.
        looked_at = [grad, *(g for g in grad_sequences if g is not None), *rows, room.partials]
        verdict = module.verdict(looked_at if room.own is None else [*looked_at, room.own])
        if not bool(verdict.isfinite()):
            if trains:
                module.after_backward(spoilt=True)
            return verdict, None
    pooled, sequence = vectors.to_owners(done, room, rows)
    local = None
    if module.owner is not None:
        local = Gradients(pooled, sequence, None, kept["winners"])
    weight_gradient = None
    if done.wants("weight_gradient"):
        from embforge.sharded.weight_gradients import weight_gradients

        weight_gradient = weight_gradients(module, done, kept, grad, saved[0], local, batch, gradients, given)
    if not trains:
        return verdict, weight_gradient
    if module.owner is not None:
        module.owner.update(done.local, local)
    if module.replicas is not None:
        module.replicas.backward(done, kept, grad, given)
    module.after_backward(spoilt=False)
    return verdict, weight_gradient
