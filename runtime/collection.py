"""`EmbeddingCollection`: the tables and features of a spec as one torch module."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embforge.backends import DEVICES_OF, BackendName, arch_of, backend_on
from embforge.chosen_device import chosen_device
from embforge.codegen.layout import CollectionLayout, layout_by_table, layout_of
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.codegen.reading.numbers import size
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.choose import Choice
from embforge.conversion import common_device, convert
from embforge.id_resolution import ResolveStep, resolve_step
from embforge.inputs import BOUNDS_CHECKS, CPU, BoundsCheck, normalise, usual_bounds_check
from embforge.launch.kernels import loaded_kernel
from embforge.lookups import Lookups
from embforge.number_formats import ID_NAMES
from embforge.operators.exported import ExportedLookup
from embforge.pickle_layout import with_layout, without_layout
from embforge.plan_choice import Choices, check_batch_size, check_params, choice_of, choose_params, usable
from embforge.storage.parameter_table import Sparse, sparse_tables
from embforge.storage.remap import Remap, RemappedModule, set_remaps
from embforge.storage.rule_entry import check_keys
from embforge.storage.table import Tables, new_table, remaps_of
from embforge.trace.file_format import FILE_VARIABLE
from embforge.training.calls import Programs
from embforge.training.enclosing_model import refuse_average
from embforge.training.numbers import drawn_seed
from embforge.training.rule_groups import Optimizers, rule_groups
from embforge.training.trainer import Trainer


class EmbeddingCollection(RemappedModule, Lookups):
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
        self._ready = {}
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
        rows = self.sequence_rows(batch)
        pooled, sequence = self.lookup(tables, batch, rows)
        sequences = iter(() if sequence is None else sequence.split(self.sequence_sizes(rows)))
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
        chosen = self.chosen[id_dtype]
        return {name: choice_of(plan, chosen) for name, plan in self.plans(id_dtype).items()}

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

    def _program_texts(self, device: torch.device) -> dict[torch.dtype, Programs]:
        """The programs of all kernels, by id dtype. They are made before any call, because torch.compile could not
        trace it."""
        self.chosen = {name: self._chosen(name, device) for name in ID_NAMES.values()}
        self._exported = {dtype: self._exported_text(name) for dtype, name in ID_NAMES.items()}
        programs = {
            dtype: self.trainer.programs(self._plans(name, device), self.kernels) for dtype, name in ID_NAMES.items()
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
        return with_layout(kept | emptied)

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, without_layout(state))
        self.programs = self._program_texts(self.device)
        self._own_rows()
