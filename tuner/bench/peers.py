"""Contenders for lookups: the usual libraries, each called in its fastest reasonable way.

The tables of every peer are filled by `fill_table`, so that outputs can be compared. A peer's input is prepared, before
the clock starts, in the form that it takes: the torch loop gets the ids and offsets of each feature as tensors of their
own. FBGEMM has two modules that look up; the faster one is the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import EmbforgeError
from embforge.codegen.layout import layout_of
from embforge.codegen.poolings import Shape
from embforge.codegen.spec import CollectionSpec, FeatureSpec
from embforge.number_formats import torch_dtype
from embforge.tuner.measure.paired import Contender, measure
from embforge.tuner.workload.tensors import input_of
from embforge.tuner.workload.workload import Batch

PEERS = ("torch", "fbgemm")
TORCH_POOLINGS = ("sum", "mean", "max", "none")
FBGEMM_DTYPES = ("fp32", "fp16")
FBGEMM_POOLINGS = {"sum": "SUM", "mean": "MEAN", "none": "NONE"}
FILL_ROWS = 8191
TRIAL_SECONDS = 0.5


class PeerUnavailableError(EmbforgeError):
    """A peer is not installed, or cannot do what the spec asks. The message says which."""


def peer_named(name: str, spec: CollectionSpec, batches: Sequence[Batch], device: str = "cpu") -> Peer:
    """The peer for a spec, ready to run. `PeerUnavailableError` if it cannot look up the spec or is not installed."""
    if name == "torch":
        return torch_peer(spec, device)
    if name == "fbgemm":
        return fbgemm_peer(spec, batches, device)
    raise PeerUnavailableError(f"peer {name!r} is not known; allowed: {', '.join(PEERS)}")


@torch.no_grad()
def fill_table(rows: Tensor, seed: int) -> None:
    """Fills `rows` (`[V, D]`) with numbers in [-1, 1), the same for equal seeds, at the speed of a copy."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.rand(min(FILL_ROWS, rows.shape[0]), rows.shape[1], generator=generator).mul_(2).sub_(1)
    block = block.to(rows.dtype).to(rows.device)
    for start in range(0, rows.shape[0], FILL_ROWS):
        part = rows[start : start + FILL_ROWS]
        part.copy_(block[: part.shape[0]])


@dataclass(frozen=True, eq=False)
class Peer:
    """A contender made of two functions. `note` says how the library is called."""

    name: str
    note: str
    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Any]
    outputs: Callable[[Any], list[Tensor]]
    """Turns what `run` returned into one tensor per feature, in the spec's order."""
    rounded_to: tuple[torch.dtype, ...]
    """For each feature: the type to which the library rounds its results. A tensor that joins the results of several
    features may have a wider type."""


def torch_peer(spec: CollectionSpec, device: str = "cpu") -> Peer:
    """One nn.EmbeddingBag per feature in a loop, results concatenated; nn.Embedding for pooling 'none'."""
    check_torch(spec)
    weights = {t.name: filled_rows(spec, index, device) for index, t in enumerate(spec.tables)}
    modules = [torch_module(feature, weights[feature.table]) for feature in spec.features]
    pooled = all(f.kind.pooled for f in spec.features)

    def prepare(batch: Batch) -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
        arguments = [torch_arguments(spec, batch, index, device) for index in range(len(spec.features))]
        return list(zip(modules, arguments, strict=True))

    def run(calls: list[tuple[nn.Module, tuple[Tensor, ...]]]) -> Any:
        results = [module(*arguments) for module, arguments in calls]
        return torch.cat(results, 1) if pooled and len(results) > 1 else results

    note = "one nn.EmbeddingBag per feature, then cat" if len(modules) > 1 else f"nn.{type(modules[0]).__name__}"
    rounded_to = tuple(weights[feature.table].dtype for feature in spec.features)
    return Peer("torch", note, prepare, run, lambda result: _columns(spec, result), rounded_to)


def check_torch(spec: CollectionSpec) -> None:
    """Raises `PeerUnavailableError` if torch's modules cannot look up the spec."""
    for feature in spec.features:
        dtype = spec.table(feature.table).dtype
        if feature.pooling not in TORCH_POOLINGS:
            raise PeerUnavailableError(f"feature {feature.name!r}: torch has no module for pooling {feature.pooling!r}")
        if feature.weighted and feature.pooling != "sum":
            raise PeerUnavailableError(f"feature {feature.name!r}: torch has weights only for pooling 'sum'")
        if not DTYPES[dtype].torch_computes:
            raise PeerUnavailableError(f"table {feature.table!r}: nn.EmbeddingBag takes no {dtype}")


def fbgemm_peer(spec: CollectionSpec, batches: Sequence[Batch], device: str = "cpu") -> Peer:
    """FBGEMM's table-batched embeddings: the training module or the inference module, whichever is faster."""
    check_fbgemm(spec)
    training = fbgemm_training_module(spec, device, "EXACT_SGD")
    kinds = [_fbgemm_contender(spec, "training TBE, no bounds check", training, device)]
    if spec.features[0].kind.pooled:
        kinds.append(_fbgemm_inference(spec, device))
    if len(kinds) == 1:
        return kinds[0]
    with torch.no_grad():
        times = measure([_renamed(kind, kind.note) for kind in kinds], batches, seconds=TRIAL_SECONDS)
    return min(kinds, key=lambda kind: times.median(kind.note))


def _renamed(peer: Peer, name: str) -> Contender:
    return replace(peer, name=name)


def output_types(spec: CollectionSpec) -> tuple[torch.dtype, ...]:
    """The type of each feature's results, for a library that rounds all of them to the spec's output type."""
    return (torch_dtype(spec.output_dtype),) * len(spec.features)


def filled_rows(spec: CollectionSpec, index: int, device: str) -> Tensor:
    """The rows of table `index` of the spec, filled by `fill_table`."""
    table = spec.tables[index]
    dtype = torch_dtype(table.dtype)
    rows = torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype, device=device)
    fill_table(rows, index)
    return rows


def torch_module(feature: FeatureSpec, weight: Tensor, **options: Any) -> nn.Module:
    """nn.EmbeddingBag for a feature, or nn.Embedding for pooling 'none'."""
    # torch reads padding_idx=-1 as the last row. Other ids outside of the table occur in no workload.
    options["padding_idx"] = feature.padding_idx if feature.padding_idx in range(len(weight)) else None
    if feature.kind.shape is Shape.SEQUENCE:
        module: nn.Module = nn.Embedding.from_pretrained(weight, **options)
    else:
        module = nn.EmbeddingBag.from_pretrained(weight, mode=feature.pooling, **options)
    return module


def torch_arguments(spec: CollectionSpec, batch: Batch, index: int, device: str) -> tuple[Tensor, ...]:
    """One feature's ids (and offsets and weights) of a batch, as its torch module takes them."""
    feature, where = spec.features[index], batch.feature(index)
    # Copies, because users of such a loop have one tensor per feature; views into the joint tensors may be unaligned.
    ids = torch.from_numpy(batch.values[where].copy()).to(device)
    if feature.kind.shape is Shape.SEQUENCE:
        return (ids,)
    starts = batch.offsets[index * batch.size : (index + 1) * batch.size] - where.start
    offsets = torch.from_numpy(starts).to(device)
    if not feature.weighted or batch.weights is None:
        return ids, offsets
    dtype = torch_dtype(spec.table(feature.table).dtype)
    return ids, offsets, torch.from_numpy(batch.weights[where].copy()).to(device, dtype)


def _columns(spec: CollectionSpec, result: Any) -> list[Tensor]:
    """The results by feature: a pooled `[B, total]` result is cut into columns, a list is returned unchanged."""
    if isinstance(result, list):
        return result
    return list(result.split([feature.width for feature in layout_of(spec).features], 1))


def check_fbgemm(spec: CollectionSpec) -> None:
    """Raises `PeerUnavailableError` if one FBGEMM call cannot look up the spec."""
    for table in spec.tables:
        if table.dtype not in FBGEMM_DTYPES:
            raise PeerUnavailableError(f"table {table.name!r}: FBGEMM takes no {table.dtype} rows")
        if table.embedding_dim % 4:
            raise PeerUnavailableError(
                f"table {table.name!r}: FBGEMM needs an embedding_dim divisible by 4, not {table.embedding_dim}"
            )
    for feature in spec.features:
        if feature.pooling not in FBGEMM_POOLINGS:
            raise PeerUnavailableError(f"feature {feature.name!r}: FBGEMM has no pooling {feature.pooling!r}")
        if feature.padding_idx is not None:
            raise PeerUnavailableError(f"feature {feature.name!r}: FBGEMM has no padding_idx")
        if feature.weighted and feature.pooling != "sum":
            raise PeerUnavailableError(
                f"feature {feature.name!r}: FBGEMM defines pooling {feature.pooling!r} with weights differently"
            )
    for what, kinds in (
        ("dtype", {t.dtype for t in spec.tables}),
        ("pooling", {f.pooling for f in spec.features}),
        ("weighted", {f.weighted for f in spec.features}),
    ):
        if len(kinds) > 1:
            raise PeerUnavailableError(
                f"one FBGEMM call takes the same {what} everywhere, the spec has {sorted(map(str, kinds))}"
            )
    if spec.features[0].kind.shape is Shape.SEQUENCE and len({t.embedding_dim for t in spec.tables}) > 1:
        dims = sorted({t.embedding_dim for t in spec.tables})
        raise PeerUnavailableError(f"one FBGEMM call without pooling takes one embedding_dim, the spec has {dims}")


def _fbgemm_api() -> dict[str, Any]:
    """The names of FBGEMM's modules that are used here. `PeerUnavailableError` if FBGEMM is not installed."""
    try:
        from fbgemm_gpu import (
            split_embedding_configs,
            split_table_batched_embeddings_ops_common,
            split_table_batched_embeddings_ops_inference,
            split_table_batched_embeddings_ops_training,
        )
    except ImportError as error:
        raise PeerUnavailableError(f"FBGEMM is not installed ({error}); pip install fbgemm-gpu-cpu==1.8.0") from error
    api: dict[str, Any] = {}
    for module in (
        split_embedding_configs,
        split_table_batched_embeddings_ops_common,
        split_table_batched_embeddings_ops_training,
        split_table_batched_embeddings_ops_inference,
    ):
        api |= vars(module)
    return api


def fbgemm_training_module(spec: CollectionSpec, device: str, optimizer: str, **options: Any) -> Any:
    """FBGEMM's training TBE without bounds checks, its tables filled by `fill_table`."""
    api = _fbgemm_api()
    location, compute = _fbgemm_location(api, device)
    module = api["SplitTableBatchedEmbeddingBagsCodegen"](
        [(t.num_embeddings, t.embedding_dim, location, compute) for t in spec.tables],
        feature_table_map=[f.table_index for f in layout_of(spec).features],
        optimizer=api["EmbOptimType"][optimizer],
        weights_precision=_sparse_type(api, spec.tables[0].dtype),
        output_dtype=_sparse_type(api, spec.output_dtype),
        pooling_mode=api["PoolingMode"][FBGEMM_POOLINGS[spec.features[0].pooling]],
        bounds_check_mode=api["BoundsCheckMode"].NONE,
        **options,
    )
    for index, rows in enumerate(module.split_embedding_weights()):
        fill_table(rows, index)
    return module


def _fbgemm_inference(spec: CollectionSpec, device: str) -> Peer:
    api = _fbgemm_api()
    location, _ = _fbgemm_location(api, device)
    kind = _sparse_type(api, spec.tables[0].dtype)
    module = api["IntNBitTableBatchedEmbeddingBagsCodegen"](
        [(t.name, t.num_embeddings, t.embedding_dim, kind, location) for t in spec.tables],
        feature_table_map=[f.table_index for f in layout_of(spec).features],
        device=device,
        output_dtype=_sparse_type(api, spec.output_dtype),
        pooling_mode=api["PoolingMode"][FBGEMM_POOLINGS[spec.features[0].pooling]],
        bounds_check_mode=api["BoundsCheckMode"].NONE,
        row_alignment=1 if device == "cpu" else 16,
    )
    module.initialize_weights()
    for index, (rows, _) in enumerate(module.split_embedding_weights()):
        table = spec.tables[index]
        dtype = torch_dtype(table.dtype)
        fill_table(rows.view(dtype)[:, : table.embedding_dim], index)
    return _fbgemm_contender(spec, "inference TBE, no bounds check", module, device)


def fbgemm_arguments(batch: Batch, weighted: bool, device: str) -> tuple[Tensor, ...]:
    """A batch as FBGEMM's modules take it."""
    values, offsets, weights = input_of(batch, device)[:3]
    return (values, offsets, weights) if weighted and weights is not None else (values, offsets)


def _fbgemm_location(api: dict[str, Any], device: str) -> tuple[Any, Any]:
    """FBGEMM's enum members for a device: where the tables are, and where it computes."""
    on_cpu = device == "cpu"
    location = api["EmbeddingLocation"].HOST if on_cpu else api["EmbeddingLocation"].DEVICE
    return location, api["ComputeDevice"].CPU if on_cpu else api["ComputeDevice"].CUDA


def _sparse_type(api: dict[str, Any], dtype: str) -> Any:
    """FBGEMM's enum member for a dtype."""
    return api["SparseType"][dtype.upper()]


def _fbgemm_contender(spec: CollectionSpec, note: str, module: Any, device: str) -> Peer:
    weighted = spec.features[0].weighted

    def prepare(batch: Batch) -> tuple[Tensor, ...]:
        return fbgemm_arguments(batch, weighted, device)

    def run(arguments: tuple[Tensor, ...]) -> Any:
        return module(*arguments)

    return Peer("fbgemm", note, prepare, run, partial(_fbgemm_outputs, spec), output_types(spec))


def _fbgemm_outputs(spec: CollectionSpec, result: Tensor) -> list[Tensor]:
    if spec.features[0].kind.shape is Shape.SEQUENCE:
        return [result]
    return _columns(spec, result)
