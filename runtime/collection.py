"""`EmbeddingCollection`: the tables and features of a spec as one torch module."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embforge.backends import DEVICES_OF, BackendName, arch_of, backend_on
from embforge.chosen_device import chosen_device
from embforge.codegen.layout import CollectionLayout, layout_by_table, layout_of
from embforge.codegen.params import Params, ResolveParams
from embforge.codegen.plan import Plan
from embforge.codegen.reading.numbers import size
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.choose import Choice
from embforge.conversion import common_device, convert
from embforge.id_resolution import ResolveStep, resolve_step
from embforge.inputs import BOUNDS_CHECKS, CPU, Batch, BoundsCheck, normalise, usual_bounds_check, with_negation_applied
from embforge.launch.kernels import Kernel, kernel_of, loaded_kernel
from embforge.launch.metadata import Metadata, addresses_of, check_tables, metadata_of
from embforge.operator_arguments import sequence_elements
from embforge.operators import dense as dense_ops
from embforge.operators import lookup as ops
from embforge.operators.dispatch import has_numbers, leaves_process, must_dispatch
from embforge.operators.exported import ExportedLookup
from embforge.plan_choice import Choices, check_batch_size, check_params, choose_params, usable
from embforge.storage.parameter_table import Sparse, sparse_tables
from embforge.storage.remap import Remap, RemappedModule, set_remaps
from embforge.storage.rule_entry import check_keys
from embforge.storage.table import Tables, new_table, remaps_of
from embforge.torch_internals import graph_break, is_exporting
from embforge.trace.file_format import FILE_VARIABLE
from embforge.training.calls import Programs
from embforge.training.enclosing_model import refuse_average
from embforge.training.numbers import drawn_seed
from embforge.training.rule_groups import Optimizers, rule_groups
from embforge.training.trainable_collection import TrainableCollection
from embforge.training.trainer import Trainer

SPARSE = (
    "torch.compile cannot hold sparse gradients in a graph: make the EmbeddingCollection with sparse=False (dense "
    "gradients) or with an optimizer of embforge.optim, or compile without fullgraph=True"
)
ACCUMULATED = (
    "gradients that accumulate until step() cannot be part of a graph: make the EmbeddingCollection without "
    "accumulate=True, or compile without fullgraph=True"
)
"""Reasons why a compiled graph cannot contain a call."""

ID_DTYPES = {torch.int32: "int32", torch.int64: "int64"}

# Named once for speed: every dot in the path to a function is an attribute access, and small lookups take microseconds.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


class _Ready(NamedTuple):
    """A kernel's call with the metadata of the tables, which is valid until a table moves."""

    addresses: list[int]
    """The addresses and sizes of the tables when the metadata was made."""
    call: Callable[[Metadata, Sequence[Tensor], Batch, int, str], tuple[Tensor, Tensor | None]]
    metadata: Metadata


class EmbeddingCollection(RemappedModule, TrainableCollection):
    """Computes all lookups of a spec in one fused kernel call.

    `device`: the device of the tables; None is torch's default, which `with torch.device("meta")` sets. `backend`:
    "cuda", "cpu", "simt" (the CUDA kernels executed on the CPU, slowly, with every access checked) or "reference"; None
    chooses by device. `bounds_check`: "error" raises IndexError for an id outside its table, "zero" treats such ids as
    absent, "unchecked" trusts ids (and is "zero" if a `padding_idx` is not a row). `kernels`: a directory that
    `embforge gen` wrote, in which kernels are searched before the cache. `params`, `backward_params`: plan fields to
    use; None uses what `embforge tune` found for this spec and machine, or the default if it found nothing.
    `batch_size`: the usual number of samples per call, if known; it only helps to choose among tuned results.

    `optimizer`: an optimizer of `ef.optim`, which updates rows in the backward pass (every forward's backward is one
    update), or in `step()` if `accumulate=True`. None makes the tables parameters for torch.optim. A mapping such as
    `{"users": ef.optim.Adam(), "*": ef.optim.SGD()}` has an optimizer for each table; None in it means that the table
    is not trained. `sparse` is for tables that are parameters: True (the default) gives them sparse gradients, which
    hold only the rows that occur. False gives them dense gradients, which all optimizers, DistributedDataParallel,
    `clip_grad_norm_` and torch.compile support, and for which each backward pass writes as many bytes as the tables
    have. A list of names gives these tables sparse gradients and the others dense ones.

    `remap`: for tables whose ids are not rows (`TableSpec.remap`), the row of each id, by table; -1 means that the id
    is absent. Without this argument, a state dict or `set_remap` must set the rows before the first call.
    """

    _resolve: ResolveStep | None = None
    """The step that turns ids into rows before every lookup; None where ids are rows."""

    def __init__(
        self,
        spec: CollectionSpec,
        device: str | torch.device | None = None,
        backend: BackendName | None = None,
        optimizer: Optimizers = None,
        bounds_check: BoundsCheck = "error",
        accumulate: bool = False,
        kernels: str | Path | None = None,
        params: Params | None = None,
        backward_params: Params | None = None,
        batch_size: int | None = None,
        sparse: Sparse = None,
        remap: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, CollectionSpec):
            raise TypeError(
                f"spec: got {type(spec).__name__}; allowed: CollectionSpec, see CollectionSpec.from_toml(path)"
            )
        if bounds_check not in BOUNDS_CHECKS:
            raise ValueError(f"bounds_check={bounds_check!r} is not known; allowed: {', '.join(BOUNDS_CHECKS)}")
        self.spec = spec
        device = chosen_device(device)
        groups = rule_groups(optimizer, spec)
        self.trainer = Trainer(groups, accumulate, device)
        self._fused = groups is not None
        self.layout: CollectionLayout = layout_of(spec) if groups is None else layout_by_table(spec, groups.updates())
        self._has_sequence = bool(self.layout.sequence_features)
        self._bounds_check: str = usual_bounds_check(spec, bounds_check)
        self.backend = backend_on(device, backend)
        self.kernels = str(kernels) if kernels is not None else None
        self._requested_params: dict[str, Params | None] = {"forward": params, "backward": backward_params}
        for op, fields in self._requested_params.items():
            check_params(fields, self.backend, op)
        check_batch_size(batch_size)
        self._batch_size = batch_size
        self.chosen: dict[str, Choices] = {}
        """The chosen plan fields, and the reason for each choice, by id dtype and op."""
        self.tables = Tables()
        sparse_names = sparse_tables(spec, sparse, optimizer)
        for place, table in enumerate(self.layout.tables):
            name = table.table.name
            group = None if groups is None else groups.of_table(place)
            self.tables.add(
                name,
                new_table(
                    spec.tables[place],
                    table,
                    device,
                    sparse=name in sparse_names,
                    fused=groups is not None,
                    initial=None if group is None else group.optimizer.initial_states,
                    has_rule=group is not None,
                ),
            )
        set_remaps(spec, self.remaps(), remap)
        check_keys(key for name, table in self.named_tables().items() for key in table.keys(f"tables.{name}."))
        self._ready: dict[torch.dtype, _Ready] = {}
        self._cached_memory = None
        self.programs = self._program_texts(device)
        self._own_rows()
        self.reset_parameters()
        if self._fused and device.type != "meta":  # drawn after the rows, so that they do not depend on the optimizer
            self.seed(drawn_seed())
        if FILE_VARIABLE in os.environ:
            from embforge.recording import record_by_environment

            record_by_environment(self)

    @classmethod
    def from_modules(
        cls,
        modules: Mapping[str, nn.Module],
        *,
        weighted: Collection[str] = (),
        output_dtype: str | None = None,
        **options: Any,
    ) -> EmbeddingCollection:
        """A collection with copies of the rows of torch's own modules. The names of modules become names of features.

        `modules`: nn.EmbeddingBag (its mode is the pooling) and nn.Embedding (pooling "none"); modules that share a
        weight share a table. `weighted`: the names of the features that are called with per-sample weights.
        `output_dtype`: None is the dtype of the modules if all have the same, and fp32 otherwise. `options`: other
        arguments of the constructor. The default of `device` is that of the modules. So is that of `sparse`: without a
        fused optimizer, a table has sparse gradients if all modules that share it have them. Frozen weights stay
        frozen. Raises SpecError with the name of a module that cannot be converted, and the reason.
        """
        spec, weights, sparse = convert(modules, weighted, output_dtype)
        chosen: dict[str, Any] = {"device": common_device(weights)} if options.get("device") is None else {}
        if options.get("optimizer") is None and options.get("sparse") is None:
            chosen["sparse"] = sparse
        collection = cls(spec, **options | chosen)
        with torch.no_grad():
            for name, weight in weights.items():
                if not collection.weight(name).is_meta:
                    collection.weight(name).copy_(weight)
        frozen = [name for name, weight in weights.items() if not weight.requires_grad]
        if frozen:
            collection.freeze(*frozen)
        return collection

    def num_parameters(self) -> int:
        """The number of elements in the rows of all tables. Optimizer states and padding do not count."""
        return sum(table.num_embeddings * table.embedding_dim for table in self.spec.tables)

    def reset_parameters(self) -> None:
        """Draws new values for all rows, uniformly from +-1/sqrt(rows), and resets optimizer states and the step."""
        for table in self.named_tables().values():
            table.reset()
        self.trainer.restart()

    def forward(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Looks up a batch and returns `[B, total dim]`: the results of all features, concatenated in the spec's order.

        `values`: ids, or an object such as `ef.Jagged` that has the borders of bags too, see docs/inputs.md.
        `offsets[F*B+1]` or `lengths[F*B]`: the borders of bags, feature-major. `weights`: per-sample weights, one per
        id. Raises ValueError, TypeError or IndexError that names what is wrong.
        """
        if self._has_sequence:
            names = ", ".join(repr(f.feature.name) for f in self.layout.sequence_features)
            raise ValueError(
                f"feature {names} has pooling 'none' and no column in a [B, D] result; call forward_dict()"
            )
        tables = self._weights()
        device = CPU if tables[0].is_cpu else tables[0].device
        batch = normalise(self.spec, device, values, offsets, weights, lengths)
        if self._resolve is not None:
            batch = self._resolve(batch)
        return self.lookup(tables, batch, ())[0]

    def forward_dict(
        self,
        values: Any,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Looks up a batch and returns one tensor per feature: `[B, width]`, or `[ids of the feature, dim]` for pooling
        'none'. The arguments are those of a call of the module."""
        tables = self._weights()
        batch = normalise(self.spec, tables[0].device, values, offsets, weights, lengths)
        if self._resolve is not None:
            batch = self._resolve(batch)
        rows = self._sequence_rows(batch)
        pooled, sequence = self.lookup(tables, batch, rows)
        sequences = iter(() if sequence is None else sequence.split(self._sequence_sizes(rows)))
        result = {}
        for feature in self.layout.features:
            if feature.column is None:
                result[feature.feature.name] = next(sequences).view(-1, feature.dim)
            else:
                result[feature.feature.name] = pooled[:, feature.column : feature.column + feature.width]
        return result

    def weight(self, table: str) -> Tensor:
        """The rows of a table, `[rows, dim]`, maybe strided. It is a parameter, unless the module has a fused
        optimizer.

        The tensor is live: writing to it changes the table. It is not valid after the module moves.
        """
        self.spec.table(table)
        return self.named_tables()[table].weight

    def remaps(self) -> dict[str, Remap]:
        """The remaps by table name, for tables whose ids are not rows."""
        return remaps_of(self.named_tables())

    def check(self) -> None:
        """Waits for the device and raises the error of an earlier call, if there is one. Only CUDA has such errors."""
        for programs in self.programs.values():
            for program in dict.fromkeys(programs):
                kernel = loaded_kernel(program)
                if kernel is not None:
                    kernel.check()

    def plan(self, id_dtype: str = "int64") -> Plan:
        """The plan of the kernel that a call with ids of this dtype runs, if no gradient is wanted."""
        return self.plans(id_dtype)["forward"]

    def plans(self, id_dtype: str = "int64") -> dict[str, Plan]:
        """The plans of all kernels that calls with ids of this dtype may run, by what they are for: "forward", "train",
        "backward" and so on."""
        return self._plans(id_dtype, self.device)

    def choices(self, id_dtype: str = "int64") -> dict[str, Choice]:
        """The fields of each of the plans that `plans` returns, and why they were chosen."""
        chosen: dict[str, Choice] = dict(self.chosen[id_dtype])
        fixed = Choice(ResolveParams(), "it has nothing to tune")
        of_op = {"forward": chosen["forward"], "forward_train": chosen["forward"], "resolve": fixed}
        return {name: of_op.get(plan.op, chosen["backward"]) for name, plan in self.plans(id_dtype).items()}

    def extra_repr(self) -> str:
        spec = self.spec
        memory = size(sum(table.table_bytes for table in self.layout.tables))
        sizes = (
            f"{len(spec.tables)} tables, {len(spec.features)} features, {self.num_parameters():,} parameters, {memory}"
        )
        trained = f", optimizer={self.trainer}" if self._fused else ""
        trained += ", accumulate=True" if self.trainer.accumulate else ""
        dense = [name for name, table in self.named_tables().items() if not self._fused and not table.sparse]
        trained += f", dense gradients: {', '.join(dense)}" if dense else ""
        frozen = [name for name, table in self.named_tables().items() if not table.is_trained()]
        trained += f", frozen: {', '.join(frozen)}" if frozen else ""
        return f"{spec.name or 'collection'}: {sizes}, backend={self.backend}{trained}"

    def lookup(self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The part of every call after the check of its input. Returns the pooled results, and the flat rows of `none`
        features."""
        values = batch[0]
        if _is_grad_enabled() and self._want_gradients(tables, batch[2]):
            return self._lookup_to_train(tables, batch, sequence_rows)
        if must_dispatch(values):
            return self._call_operator(tables, batch, sequence_rows)
        if self._fused:
            self.trainer.note_forward()
        # Plain eager calls skip the dispatcher, which would cost as much as a small lookup.
        batch = with_negation_applied(batch)
        ready = self._ready.get(values.dtype)
        if ready is None or ready[0] != addresses_of(tables):
            if values.is_meta:  # the operator's fake implementation computes the shapes
                return self._call_operator(tables, batch, sequence_rows)
            ready = self._make_ready(tables, batch)
        elements = sequence_elements(self.layout, sequence_rows) if sequence_rows else 0
        return ready[1](ready[2], tables, batch, elements, self._bounds_check)

    def _lookup_to_train(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """A lookup that autograd records."""
        trainer, programs = self.trainer, self._program(batch)
        if self._is_fsdp_managed_module and self._fused:
            self.refuse_fsdp()
        elements = sequence_elements(self.layout, sequence_rows) if sequence_rows else 0
        parameters, table_objects = () if self._fused else tables, list(self.named_tables().values())
        if not must_dispatch(batch.values) and not batch.values.is_meta:
            return trainer.lookup(programs, self._table_memory(tables), table_objects, batch, elements, parameters)
        if is_exporting():  # an exported graph only serves, and needs no optimizer states
            return self._call_operator(tables, batch, sequence_rows)
        memory, numbers = self._new_table_memory(tables), trainer.numbers
        if numbers is None and not any(h.sparse and t for h, t in zip(table_objects, memory.trainable, strict=True)):
            return self._call_dense_operator(tables, batch, sequence_rows)
        if numbers is None or trainer.accumulate:
            # Sparse and accumulated gradients cannot be part of a graph: a compiler leaves these calls to Python.
            if _is_compiling() or has_numbers(batch.values):
                untraced = _untraced(trainer.lookup, SPARSE if numbers is None else ACCUMULATED)
                result: tuple[Tensor, Tensor | None] = untraced(
                    programs, memory, table_objects, batch, elements, parameters
                )
                return result
            return self._call_operator(tables, batch, sequence_rows)
        anchor = numbers.anchor if any(memory.trainable) else numbers.anchor.detach()
        results: tuple[Tensor, ...] = ops.lookup_train(
            batch.values,
            batch.offsets,
            batch.weights,
            self._blocks(),
            memory.states,
            anchor,
            numbers.hyper,
            numbers.counters,
            list(sequence_rows),
            programs.train,
            programs.backward,
            programs.weight_gradient,
            self._bounds_check,
            memory.trainable,
        )
        return results[0], results[1]

    def _make_ready(self, tables: list[Tensor], batch: Batch) -> _Ready:
        check_tables(self.layout, tables)
        programs = self._program(batch)
        kernel: Kernel = kernel_of(programs.forward, programs if self._fused else ())
        metadata = metadata_of(tables, self._bounds_check)
        ready = _Ready(addresses_of(tables), kernel.__call__, metadata)
        self._ready[batch.values.dtype] = ready
        return ready

    def _call_operator(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        rows = list(sequence_rows) or None
        program = self._exported[batch.values.dtype] if leaves_process() else self._program(batch).forward
        result: tuple[Tensor, Tensor] = ops.lookup(
            batch.values, batch.offsets, batch.weights, tables, rows, program, self._bounds_check
        )
        return result

    def _call_dense_operator(
        self, tables: list[Tensor], batch: Batch, sequence_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        programs, rows = self._program(batch), list(sequence_rows) or None
        texts = (programs.train, programs.reduce, programs.weight_gradient)
        results: tuple[Tensor, ...] = dense_ops.lookup_dense(
            batch.values, batch.offsets, batch.weights, tables, rows, *texts, self._bounds_check
        )
        return results[0], results[1]

    def _program_texts(self, device: torch.device) -> dict[torch.dtype, Programs]:
        """The programs of all kernels, by id dtype. They are made before any call, because torch.compile could not
        trace it."""
        self.chosen = {name: self._chosen(name, device) for name in ID_DTYPES.values()}
        self._exported = {dtype: self._exported_text(name) for dtype, name in ID_DTYPES.items()}
        programs = {
            dtype: self.trainer.programs(self._plans(name, device), self.kernels) for dtype, name in ID_DTYPES.items()
        }
        resolve_programs = {dtype: made.resolve for dtype, made in programs.items()}
        self._resolve = resolve_step(self.spec, self.backend, resolve_programs, self.remaps(), programs)
        return programs

    def _exported_text(self, id_dtype: str) -> str:
        params = self._requested_params["forward"]
        return ExportedLookup(self.backend, id_dtype, self.spec, params, self._batch_size).text

    def _chosen(self, id_dtype: str, device: torch.device) -> Choices:
        groups, batch = self.trainer.groups, self._batch_size
        updates = () if groups is None else groups.different_updates()
        chosen = choose_params(self.spec, self.backend, device, self._requested_params, updates, batch, id_dtype)
        return usable(chosen, partial(self._plans_with, id_dtype, device), self.kernels)

    def _plans(self, id_dtype: str, device: torch.device) -> dict[str, Plan]:
        chosen = self.chosen[id_dtype]
        return self._plans_with(id_dtype, device, chosen["forward"].params, chosen["backward"].params)

    def _plans_with(self, id_dtype: str, device: torch.device, params: Params, backward: Params) -> dict[str, Plan]:
        arch = arch_of(self.backend, device)
        return self.trainer.plans(self.spec, self.backend, arch, id_dtype, params, backward)

    def _program(self, batch: Batch) -> Programs:
        return self.programs[batch.values.dtype]

    def _sequence_rows(self, batch: Batch) -> tuple[int, ...]:
        """The number of ids of each `none` feature. It is read from the device only if the caller did not pass it and
        there are several features."""
        wanted = [f.index for f in self.layout.sequence_features]
        if not wanted:
            return ()
        if batch.rows_per_feature is not None:
            return tuple(batch.rows_per_feature[i] for i in wanted)
        if len(self.layout.features) == 1:
            return (batch.values.numel(),)
        if batch.batch == 0:
            return (0,) * len(wanted)
        borders = batch.offsets[:: batch.batch].tolist()
        # Limited to the number of ids: the kernel refuses wrong offsets, but only after results have been allocated.
        return tuple(max(0, min(borders[i + 1] - borders[i], batch.values.numel())) for i in wanted)

    def _sequence_sizes(self, rows: Sequence[int]) -> list[int]:
        return [count * f.dim for count, f in zip(rows, self.layout.sequence_features, strict=True)]

    @property
    def bounds_check(self) -> str:
        """How ids outside their table are treated: the constructor's argument, or "zero" instead of "unchecked" if ids
        may be absent."""
        return self._bounds_check

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        device: torch.device = self._weights()[0].device
        return device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingCollection:
        nn.Module._apply(self, fn, recurse)
        self._moved(self.device)
        return self

    def _moved(self, device: torch.device) -> None:
        self._ready, self._cached_memory = {}, None
        if device.type not in (*DEVICES_OF[self.backend], "meta"):
            self.backend = backend_on(device)
            self._requested_params = dict.fromkeys(self._requested_params)
        self.trainer.move(device)
        if self._facade is not None:
            self._facade.moved()
        self.programs = self._program_texts(device)
        self._own_rows()

    def _own_rows(self) -> None:
        """Marks the first table, so that operators which read rows can notify this module's training."""
        if self.trainer.numbers is not None:
            self.trainer.numbers.own(self._weights()[0])

    def __getstate__(self) -> dict[str, Any]:
        if self._fused and any(table.trainable for table in self.named_tables().values()):
            refuse_average()
        kept = {
            name: value for name, value in self.__dict__.items() if name != "lookup"
        }  # set while recording.py records
        # A copy may be loaded in another process or on another machine, so it makes these again.
        emptied: dict[str, Any] = {
            "_ready": {},
            "_cached_memory": None,
            "programs": {},
            "_exported": {},
            "_facade": None,
            "_resolve": None,
        }
        return {**kept, **emptied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.programs = self._program_texts(self.device)
        self._own_rows()


def _untraced(function: Any, reason: str) -> Any:
    """The function, excluded from compiled graphs. If that is not allowed (fullgraph=True), torch's error says why."""
    if _is_compiling():
        graph_break(reason)
    return torch.compiler.disable(function)
