"""One call of a plan's backward kernels, for all GPU launchers: work space, arguments, and the steps in stream order.

A step is a launch, or an operation of torch on tensors of the call. Nothing waits for the device, because all sizes
follow from the batch. The only exception is a reduction, whose result has as many rows as occur: it has two halves, and
the host waits between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embforge.codegen.kernel import KERNELS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.backward_geometry import key_tables
from embforge.codegen.targets.cuda.backward_launch import BackwardLaunch, BackwardShape, backward_launch
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.weight_gradient import WeightsShape
from embforge.inputs import Batch
from embforge.launch.gpu.forward_call import Value
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata
from embforge.number_formats import torch_dtype

MOST_BAGS = 2**31 - 1
"""The most bags and the most ids of a batch: kernels count them in 31 bits."""
ALIGNMENT = 16
"""The alignment of gradients, in bytes: that of the widest load."""

Empty = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""A function that makes a tensor of a shape, dtype and device, with any content."""


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, and the level of the partial sums that it computes."""

    kernel: KernelLaunch
    level: int = 0


Step = Launch | Callable[[], None]


@dataclass
class Call:
    """What a call launches, and with which tensors."""

    op: str
    by_name: dict[str, Value]
    """Every argument by name except `status`, which outlives calls."""
    steps: list[Step]
    space: set[str] = field(default_factory=set)
    """The names of work space and results that are undefined until a kernel writes them. Tensors that torch writes are
    not among them."""

    def arguments(self, status: Tensor, level: int = 0) -> list[Value]:
        """The arguments of the kernels, in call order."""
        by_name = self.by_name | {"status": status, "level": level}
        return [by_name[name] for name in KERNELS[self.op].in_blocks]


def torch_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a tensor by torch's allocator."""
    return torch.empty(shape, dtype=dtype, device=device)


def gradient_arguments(metadata: Metadata, batch: Batch, gradients: Gradients, bounds_check: str) -> dict[str, Value]:
    """The arguments that all kernels of a backward read. Raises ValueError for a batch that is too large."""
    values, offsets, weights, size, _ = batch
    if size == 0 and values.numel():
        raise ValueError(f"offsets: values has {values.numel()} ids, offsets has no bag for them; both must agree")
    if offsets.numel() > MOST_BAGS or values.numel() > MOST_BAGS:
        raise ValueError(
            f"offsets, values: {offsets.numel() - 1} bags with {values.numel()} ids; a backward takes {MOST_BAGS} at "
            "most; split the batch"
        )
    sequence = gradients.sequence
    return {
        "metadata": metadata.words,
        "values": values,
        "offsets": offsets,
        "weights": weights,
        "grad_pooled": _aligned(gradients.pooled),
        "grad_sequence": None if sequence is None else _aligned(sequence),
        "divisors": gradients.divisors,
        "winners": gradients.winners,
        "batch": size,
        "num_values": values.numel(),
        "skip_bad_ids": int(bounds_check != "error"),
        "sequence_size": 0 if sequence is None else sequence.numel(),
    }


def backward_call(
    shape: BackwardShape, read: dict[str, Value], hyper: Tensor, counters: Tensor, empty: Empty = torch_empty
) -> Call:
    """The call of an update. `read` comes from `gradient_arguments`."""
    call, work = _sorted_call(shape, read, empty)
    call.by_name |= {
        "hyper": hyper,
        "counters": counters,
        "verdict": torch.zeros(1, dtype=torch.float32, device=hyper.device),
        "scalars": empty((shape.scalars,), torch.float32, hyper.device),
    }
    call.space.add("scalars")
    call.steps.append(Launch(work.rows))
    return call


@dataclass(frozen=True)
class ReduceCall:
    """The first half of a reduction. The size of its result is known when `counts` is computed."""

    call: Call
    counts: Tensor
    """How many rows of each table occur, on the device."""
    rows_kernel: KernelLaunch
    empty: Empty

    def finish(self, counts: Sequence[int], plan: Plan) -> tuple[Call, list[tuple[Tensor, Tensor]]]:
        """The second half of a reduction, and the tensors that it fills: for each table, rows and their gradients.

        `counts` has the numbers of `self.counts`, on the host.
        """
        tables = key_tables(plan)
        dims = {table: plan.spec.tables[table].embedding_dim for table in tables}
        device = self.counts.device
        rows = self.empty((sum(counts[table] for table in tables),), torch.int64, device)
        floats = sum(counts[table] * dims[table] for table in tables)
        gradients = self.empty((floats,), torch.float32, device)
        results = {
            index: (rows[:0], gradients[:0].view(0, table.embedding_dim))
            for index, table in enumerate(plan.spec.tables)
        }
        first = begin = 0
        for table in tables:
            last, end = first + counts[table], begin + counts[table] * dims[table]
            results[table] = rows[first:last], gradients[begin:end].view(-1, dims[table])
            first, begin = last, end
        by_name = self.call.by_name | {"rows": rows, "gradients": gradients}
        call = Call(self.call.op, by_name, [Launch(self.rows_kernel)])
        return call, [results[index] for index in range(len(plan.spec.tables))]


def reduce_call(shape: BackwardShape, tables: int, read: dict[str, Value], empty: Empty = torch_empty) -> ReduceCall:
    """The first half of a reduction. `tables` is the number of tables of the spec."""
    call, work = _sorted_call(shape, read, empty)
    values = read["values"]
    assert isinstance(values, Tensor)
    counts = torch.zeros(tables, dtype=torch.int64, device=values.device)
    call.by_name |= {"counts": counts, "rows": None, "gradients": None}
    return ReduceCall(call, counts, work.rows, empty)


def weight_gradient_call(
    shape: WeightsShape, read: dict[str, Value], empty: Empty = torch_empty
) -> tuple[Call, Tensor]:
    """The call that computes the gradients of per-sample weights, and the tensor that it writes them to."""
    values, batch = read["values"], read["batch"]
    assert isinstance(values, Tensor) and isinstance(batch, int)
    result = empty((values.numel(),), torch.float32, values.device)
    steps: list[Step] = [Launch(kernel) for kernel in shape.launches(batch, values.numel())]
    return Call("weight_gradient", read | {"weight_gradient": result}, steps, space={"weight_gradient"}), result


def _sorted_call(shape: BackwardShape, read: dict[str, Value], empty: Empty) -> tuple[Call, BackwardLaunch]:
    """The part of a call that updates and reductions share: work space, and the steps before the kernel that works on
    rows."""
    values, batch, sequence_size = read["values"], read["batch"], read["sequence_size"]
    assert isinstance(values, Tensor) and isinstance(batch, int) and isinstance(sequence_size, int)
    count, device = values.numel(), values.device
    work = backward_launch(shape, batch, count, sequence_size)
    key = torch_dtype(shape.key_dtype)
    sizes = {
        "keys": (count, key),
        "sorted_keys": (count, key),
        "order": (count, torch.int64),
        "bags": (count, torch.int32),
        "heads": (count, torch.int32),
        "runs": (count, torch.int32),
        "sources": (count, torch.int64),
        "factors": (count if shape.weighted else 0, torch.float32),
        "chosen": (count if shape.selects else 0, torch.int64),
        "run_begin": (count + 1, torch.int32),
        "waiting": (work.waiting, torch.int32),
        "words": (shape.words, torch.int64),
        "scaled": (work.scaled, torch.float32),
        "partials": (work.partials, torch.float32),
    }
    space = {name: empty((size,), dtype, device) for name, (size, dtype) in sizes.items()}

    def sort() -> None:
        torch.sort(space["keys"], stable=True, out=(space["sorted_keys"], space["order"]))

    def sum_heads() -> None:
        torch.cumsum(space["heads"], 0, dtype=torch.int32, out=space["runs"])

    steps: list[Step] = [
        *map(Launch, work.before_sort),
        *([sort] if count else []),
        *map(Launch, work.before_sum),
        *([sum_heads] if count else []),
        *map(Launch, work.before_rows),
        *(Launch(kernel, level) for level, kernel in enumerate(work.levels)),
    ]
    return Call(shape.op, {**read, **space}, steps, set(space) - {"sorted_keys", "order", "runs"}), work


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
