"""`ef.functional`: lookups as functions of weights that the caller passes, as in torch.nn.functional.

Kernels are made per dim, dtype and kind of lookup, never per number of rows: no size of a vocabulary costs a
compilation. If there is no kernel (fp64, int8, rows without the stride or alignment that kernels need, a machine
without a compiler), torch computes the same results.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from embforge.autograd_calls import Context
from embforge.codegen.poolings import EACH_ROW
from embforge.functional.bag import embedding_bag
from embforge.functional.external_weights import check_device, check_ids, forward_kernel, programs_for
from embforge.functional.tensor_parallel import WeightParts, group_of, parts_of, side_by_side, summed
from embforge.inputs import Batch
from embforge.launch.metadata import metadata_of
from embforge.number_formats import as_indexable, is_quantized
from embforge.operators.dispatch import must_dispatch
from embforge.operators.registration import Implementation, register

__all__ = ["embedding", "embedding_bag"]


def embedding(
    input: Tensor,
    weight: Tensor,
    tp_size: int = 1,
    tp_group: object = None,
    sharding_dim: int = 0,
    tp_rank: int | None = None,
    per_token_scale: Tensor | None = None,
    padding: int | Tensor | None = None,
) -> Tensor:
    """Rows of `weight`, of which each of `tp_size` ranks may hold a part: `[*input.shape, D]`, the same on every rank.

    `input`: ids, int32 or int64 of any shape, the same on every rank. The result for an id that is not a row, such as a
    negative one, is zeros. `tp_group`: a ProcessGroup, a 1-D DeviceMesh, a rising list of ranks (the first call makes
    its group), or None for all ranks. `tp_rank`: the number of this rank in the group.

    `sharding_dim=0`: each rank holds consecutive rows, after those of lower ranks. Ranks may hold different numbers of
    rows: usually ceil(V / tp_size), and the last ranks fewer or none. Results are summed (all-reduce).
    `sharding_dim=1`: each rank holds consecutive columns of all rows, and numbers may differ too. Results are
    concatenated (all-gather). The numbers are not arguments: ranks exchange them in the first call with a weight, and
    remember them by the tensor object. A weight that is a new tensor in every call costs a small exchange in every
    call.

    `per_token_scale`: a factor for each row of this rank's `weight` (int8 or fp8); the result has its dtype. `padding`:
    rows of zeros that the caller assumes after the last row of the weight; their number, or a tensor of them. They are
    never read and do not change the position of any row: the result for their ids is zeros.

    `weight` gets a dense gradient, as from F.embedding. As usual in tensor-parallel models, all ranks must compute the
    same from the result, so that each already has the whole upstream gradient: the backward of the all-reduce passes it
    on, that of the all-gather takes this rank's columns, and neither communicates.
    """
    _check_lookup(input, weight, tp_size, sharding_dim, per_token_scale, padding)
    if tp_size == 1:
        return parallel_embedding(input, weight, None, per_token_scale)
    group = group_of(tp_group, tp_size, tp_rank)
    return parallel_embedding(input, weight, parts_of(weight, group, sharding_dim), per_token_scale)


def parallel_embedding(
    input: Tensor, weight: Tensor, parts: WeightParts | None, scale: Tensor | None = None, padding_idx: int = -1
) -> Tensor:
    """`embedding` for a caller that knows the sizes of all ranks' parts; None if `weight` is the whole weight.

    `padding_idx`: a row of this rank's part that gets no gradient.
    """
    ids = input.reshape(-1).to(torch.int64)
    if parts is not None and parts.dim == 0:
        ids = ids - parts.first
    rows = _rows(ids, weight, padding_idx) if scale is None else _scaled_rows(ids, weight, scale.reshape(-1))
    if parts is not None:
        rows = summed(rows, parts) if parts.dim == 0 else side_by_side(rows, parts)
    return rows.view(*input.shape, rows.shape[1])


def _rows(ids: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """The rows of these ids, `[n, D]`, with zeros for ids that are not rows."""
    if (weight.requires_grad and torch.is_grad_enabled()) or must_dispatch(ids) or weight.is_meta:
        return torch.ops.embforge.gather(ids, weight, padding_idx)  # type: ignore[no-any-return]
    return _gather(ids, weight, padding_idx)


def _gather(ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    rows = _run_gather(ids, weight, None, weight.dtype)
    return _gather_by_torch(ids, weight) if rows is None else rows


def _run_gather(ids: Tensor, weight: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The rows of these ids, each multiplied by its factor, computed by a kernel in one pass; None if there is no
    kernel."""
    count = ids.numel()
    programs = programs_for(weight, dtype, EACH_ROW, factors is not None) if count and len(weight) else None
    kernel = None if programs is None else forward_kernel(programs.forward)
    if kernel is None:
        return None
    # Made on the device, because a copy from the host would wait for the device.
    borders = torch.arange(0, count + 1, count, dtype=torch.int64, device=ids.device)
    batch = Batch(ids.contiguous().resolve_neg(), borders, factors, 1, None)
    _, rows = kernel(metadata_of([weight], "zero"), [weight], batch, count * weight.shape[1], "zero")
    assert rows is not None
    return rows.resize_(
        count, weight.shape[1]
    )  # not a view, because a view returned by an operator cannot be written to


def _gather_by_torch(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of these ids, computed by torch operations that autograd can differentiate."""
    rows = _gather_rows(ids, as_indexable(weight))
    return rows if rows.dtype == weight.dtype else rows.view(weight.dtype)


def _gather_rows(ids: Tensor, weight: Tensor) -> Tensor:
    if not len(weight):  # the sum of no rows is zeros that depend on the weight, so that autograd still has a graph
        return weight.new_zeros(len(ids), weight.shape[1]) + weight.sum(0, dtype=weight.dtype)
    absent = (ids < 0) | (ids >= len(weight))
    return weight.index_select(0, ids.masked_fill(absent, 0)).masked_fill(absent[:, None], 0)


def _scaled_rows(ids: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    factors = _gather_by_torch(ids, scale[:, None])
    if not (factors.requires_grad or must_dispatch(ids)):
        rows = _run_gather(ids, weight, factors.view(-1).float().resolve_neg(), scale.dtype)
        if rows is not None:
            return rows
    return _gather_by_torch(ids, weight).to(scale.dtype) * factors


class _Context(Context, Protocol):
    """What a forward keeps for its backward in addition to the saved tensors."""

    rows: int
    padding_idx: int


def _keep(ctx: _Context, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ids, weight, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _gather_backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    (ids,) = ctx.saved_tensors
    absent = (ids < 0) | (ids >= ctx.rows) | (ids == ctx.padding_idx)
    # Gradients without a row are added to an extra row after the last, which saves a pass that would set them to zero.
    rows = ids.masked_fill(absent, ctx.rows)
    return None, torch.ops.aten.embedding_dense_backward(gradient, rows, ctx.rows + 1, -1, False)[: ctx.rows], None  # type: ignore[return-value]


def _gather_fake(ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


IMPLEMENTATIONS = {"gather": Implementation(_gather, _gather_fake, _gather_backward, _keep)}
"""The implementations by operator name."""

register()


def _check_lookup(
    input: Tensor, weight: Tensor, tp_size: int, sharding_dim: int, scale: Tensor | None, padding: object
) -> None:
    check_ids("input", input)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; allowed: [rows, dim]")
    check_device(weight, input=input, per_token_scale=scale)
    if not isinstance(tp_size, int) or tp_size < 1:
        raise ValueError(f"tp_size={tp_size!r} is not allowed; allowed: a whole number from 1")
    if sharding_dim not in (0, 1):
        raise ValueError(f"sharding_dim={sharding_dim!r} is not allowed; allowed: 0 (rows), 1 (columns)")
    if scale is not None:
        if not is_quantized(weight.dtype):
            raise TypeError(f"per_token_scale goes with an int8 or fp8 weight; this one is {weight.dtype}")
        if scale.numel() != len(weight) or not scale.is_floating_point():
            raise ValueError(
                f"per_token_scale: {scale.dtype} {tuple(scale.shape)}; allowed: a floating-point number for each of "
                f"the {len(weight)} rows of this rank's weight"
            )
    wide = isinstance(padding, Tensor) and padding.dim() == 2 and padding.shape[1] == weight.shape[1]
    if not (padding is None or wide or (isinstance(padding, int) and padding >= 0)):
        got = f"a tensor {tuple(padding.shape)}" if isinstance(padding, Tensor) else repr(padding)
        raise ValueError(f"padding: {got}; allowed: a number of rows from 0, a tensor [n, {weight.shape[1]}], or None")
