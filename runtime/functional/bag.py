"""`embedding_bag`: F.embedding_bag, computed by generated kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from embforge.autograd_calls import Context, applied
from embforge.functional.external_weights import WeightPrograms, check_device, check_ids, forward_kernel, programs_for
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, readable
from embforge.torch_internals import assert_async
from embforge.training.calls import (
    TableMemory,
    refuse_double_backward,
    run_forward_kernel,
    run_reduce_kernel,
    run_weight_gradient_kernel,
)

MODES = ("sum", "mean", "max")


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Pools bags of rows of `weight`: `[bags, D]`. Arguments, results and gradients are those of F.embedding_bag.

    Rows are added in float32 whatever the dtype, in an order that does not depend on the number of threads. An id
    outside `weight` raises IndexError; on a GPU it fails a device-side assertion, as in torch, because the call does
    not wait for the device. `sparse=True` makes a coalesced gradient, also for mode 'max'. torch computes the bags if
    the weight is fp64 or its rows do not have the stride or alignment that kernels need. `scale_grad_by_freq` and
    second derivatives are refused. With `include_last_offset`, ids after the end of the last bag are in no bag, as
    torch documents; torch's own kernels do so only for some dtypes, and then compute arbitrary gradients for those ids.
    On a GPU such ids are refused, because finding them would wait for the device.
    """
    values, borders, factors = _flat(input, weight, offsets, mode, per_sample_weights, include_last_offset)
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq=True is not supported; use torch.nn.functional.embedding_bag for it")
    padding = _padding_row(weight, padding_idx)
    _check_range(values, weight)
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), values, max_norm, norm_type)
    texts = None if weight.is_meta else programs_for(weight, weight.dtype, mode, factors is not None)
    trains = torch.is_grad_enabled() and (weight.requires_grad or (factors is not None and factors.requires_grad))
    program = "" if texts is None else texts.train if trains else texts.forward
    if texts is None or forward_kernel(program) is None:
        sparse = sparse and mode != "max"
        return F.embedding_bag(values, weight, borders, None, 2, False, mode, sparse, factors, True, padding)
    if padding is not None:  # kernels treat ids that are not rows as absent, so that they need no padding id
        values = values.masked_fill(values == padding, -1)
    return applied(_Bags, _Call(texts, program, sparse), values, borders, weight, factors)


@dataclass(frozen=True)
class _Call:
    """What a call computes, apart from its tensors."""

    texts: WeightPrograms
    program: str
    """The program of these that the forward runs."""
    sparse: bool


def _batch(values: Tensor, borders: Tensor, factors: Tensor | None) -> Batch:
    numbers = None if factors is None else factors.detach().float().contiguous().resolve_neg()
    return Batch(values, borders, numbers, borders.numel() - 1, None)


class _Context(Context, Protocol):
    """What a forward keeps for its backward in addition to the saved tensors."""

    call: _Call
    weight: Tensor


class _Bags(torch.autograd.Function):
    """`apply(call, values, borders, weight, factors)` returns the pooled bags.

    `values` and `borders` (where each bag begins, and where the last one ends) are int64, 1-D and contiguous.
    `factors`: the per-sample weights, or None.
    """

    @staticmethod
    def forward(
        ctx: _Context, call: _Call, values: Tensor, borders: Tensor, weight: Tensor, factors: Tensor | None
    ) -> Tensor:
        kept = run_forward_kernel(call.program, _table_memory(weight), _batch(values, borders, factors), 0)
        ctx.call, ctx.weight = call, weight.detach()
        # torch raises an error if a saved tensor changes before the backward. Rows are saved only with per-sample
        # weights, whose gradient needs the rows that the forward read.
        ctx.save_for_backward(
            values, borders, None if factors is None else weight, factors, kept.divisors, kept.winners
        )
        return kept.pooled

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[None, None, None, Tensor | None, Tensor | None]:
        refuse_double_backward()
        call, weight = ctx.call, ctx.weight
        values, borders, _, factors, divisors, winners = ctx.saved_tensors
        memory, batch = _table_memory(weight), _batch(values, borders, factors)
        gradients = Gradients(readable(gradient), None, divisors, winners)
        grad_weight = grad_factors = None
        if ctx.needs_input_grad[3]:
            ((rows, sums),) = run_reduce_kernel(call.texts.reduce, memory, batch, gradients)
            grad_weight = _gradient(rows, sums.to(weight.dtype), weight, call.sparse)
        if ctx.needs_input_grad[4]:
            grad_factors = run_weight_gradient_kernel(call.texts.weight_gradient, memory, batch, gradients).to(
                factors.dtype
            )
        return None, None, None, grad_weight, grad_factors


def _table_memory(weight: Tensor) -> TableMemory:
    return TableMemory([weight.detach()], [weight.new_empty(0)], [True], "zero")


def _gradient(rows: Tensor, sums: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    if sparse:
        return torch.sparse_coo_tensor(rows[None], sums, weight.shape, is_coalesced=True, check_invariants=False)
    return torch.zeros_like(weight).index_copy_(0, rows, sums)


def _flat(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    factors: Tensor | None,
    include_last: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ids, the borders of bags, and the per-sample weights of a call. Refuses what F.embedding_bag refuses."""
    check_ids("input", input)
    check_device(weight, input=input, offsets=offsets, per_sample_weights=factors)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; allowed: [rows, dim]")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not known; allowed: {', '.join(MODES)}")
    if factors is not None:
        if mode != "sum":
            raise ValueError(f"per_sample_weights cannot go with mode={mode!r}; allowed: 'sum'")
        if factors.shape != input.shape or factors.dtype != weight.dtype:
            raise ValueError(
                f"per_sample_weights: {factors.dtype} {tuple(factors.shape)}; allowed: {weight.dtype} "
                f"{tuple(input.shape)}, as weight and input are"
            )
        factors = factors.reshape(-1)
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets cannot go with a 2-D input, whose rows are the bags; pass offsets=None")
        bags, length = input.shape
        return _ids(input), torch.arange(bags + 1, dtype=torch.int64, device=input.device) * length, factors
    if input.dim() != 1:
        raise ValueError(f"input: shape {tuple(input.shape)}; allowed: 1-D with offsets, 2-D without")
    if offsets is None or offsets.dim() != 1 or (include_last and not offsets.numel()):
        got = "None" if offsets is None else f"shape {tuple(offsets.shape)}"
        raise ValueError(
            f"offsets: {got}; a 1-D input needs 1-D offsets, with include_last_offset=True at least one offset"
        )
    check_ids("offsets", offsets)
    values, borders = _ids(input), _ids(offsets)
    if not include_last:
        return values, F.pad(borders, (0, 1), value=input.numel()), factors
    end = int(borders[-1]) if borders.is_cpu else values.numel()
    if 0 <= end < values.numel():  # the ids after the end are in no bag
        values, factors = values[:end], None if factors is None else factors[:end]
    return values, borders, factors


def _ids(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).to(torch.int64).contiguous().resolve_neg()


def _padding_row(weight: Tensor, padding_idx: int | None) -> int | None:
    rows = weight.shape[0]
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx={padding_idx} is not a row; allowed: {-rows} to {rows - 1}")
    return padding_idx % rows


def _check_range(values: Tensor, weight: Tensor) -> None:
    """Raises IndexError for an id that is not a row. Kernels for any number of rows do not check ids."""
    rows = weight.shape[0]
    if not values.numel() or values.is_meta:
        return
    if values.is_cuda:
        assert_async(((values >= 0) & (values < rows)).all())
        return
    low, high = (int(end) for end in values.aminmax())
    if low < 0 or high >= rows:
        at = int(((values < 0) | (values >= rows)).nonzero()[0])
        raise IndexError(
            f"input: id {int(values[at])} at position {at} is not a row of weight; allowed: 0 to {rows - 1}"
        )
