"""Contenders for training steps: the usual libraries, each in its fastest configuration that computes the same.

Tables start with the rows that `fill_table` writes. What a library cannot do raises `PeerUnavailableError`; nothing
else is timed in its place. There is one exception, which its note names: torch has no row-wise Adagrad, so that its
Adagrad is compared with our RowwiseAdagrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from embforge.codegen.layout import layout_of
from embforge.codegen.poolings import Shape
from embforge.codegen.spec import CollectionSpec
from embforge.tuner.bench.peers import (
    PEERS,
    TRIAL_SECONDS,
    PeerUnavailableError,
    check_fbgemm,
    check_torch,
    fbgemm_arguments,
    fbgemm_training_module,
    filled_rows,
    torch_arguments,
    torch_module,
)
from embforge.tuner.bench.training_rules import ADAM_EPS, BETAS, EPS, LR, Gradients, Trainee, gradients_of
from embforge.tuner.measure.paired import measure
from embforge.tuner.workload.workload import Batch

DENSE_BYTES = 64 << 20
"""If all tables together have at most this many bytes, dense gradients are also tried: they can be faster there."""
FBGEMM_RULES = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""Our rules and FBGEMM's names for them, on the CPU. FBGEMM's CPU build refuses ADAM ("not supported in CPU mode")."""
FBGEMM_CUDA_RULES = {**FBGEMM_RULES, "adam": "ADAM"}

Calls = tuple[list[tuple[nn.Module, tuple[Tensor, ...]]], Gradients]


def training_peer_named(
    name: str, spec: CollectionSpec, rule: str, batches: Sequence[Batch], device: str = "cpu"
) -> Trainee:
    """The peer that trains a spec's tables by a rule. `PeerUnavailableError` if it cannot or is not installed."""
    if name == "torch":
        return torch_training_peer(spec, rule, batches, device)
    if name == "fbgemm":
        return fbgemm_training_peer(spec, rule, device)
    raise PeerUnavailableError(f"peer {name!r} is not known; allowed: {', '.join(PEERS)}")


def torch_training_peer(spec: CollectionSpec, rule: str, batches: Sequence[Batch], device: str = "cpu") -> Trainee:
    """One nn.EmbeddingBag per feature and one torch optimizer, with sparse gradients.

    If the tables are small, dense gradients are timed too, and the faster of the two is the peer.
    """
    check_torch(spec)
    for feature in spec.features:
        if feature.kind.selects:
            raise PeerUnavailableError(
                f"feature {feature.name!r}: nn.EmbeddingBag has no sparse gradients for {feature.pooling!r}"
            )
    sparse = _torch_trainee(spec, rule, device, sparse=True)
    total = sum(t.table.num_embeddings * t.row_bytes for t in layout_of(spec).tables)
    if rule == "adam" or total > DENSE_BYTES:  # torch's dense Adam also moves rows that do not occur
        return sparse
    dense = _torch_trainee(spec, rule, device, sparse=False)
    times = measure([_named(kind) for kind in (sparse, dense)], batches, seconds=TRIAL_SECONDS)
    # The comparison has changed both kinds' rows: make new ones.
    return _torch_trainee(spec, rule, device, sparse=times.median(sparse.note) <= times.median(dense.note))


def fbgemm_training_peer(spec: CollectionSpec, rule: str, device: str = "cpu") -> Trainee:
    """FBGEMM's training TBE with its fused optimizer, without bounds checks and stochastic rounding."""
    check_fbgemm(spec)
    rules = FBGEMM_RULES if device == "cpu" else FBGEMM_CUDA_RULES
    if rule not in rules:
        raise PeerUnavailableError(f"no such peer: FBGEMM has no {rule} on {device}; it has {', '.join(rules)}")
    order = [f.table_index for f in layout_of(spec).features]
    if order != sorted(order):  # measured: shared tables get a wrong Adagrad, row-wise Adagrad raises
        raise PeerUnavailableError(
            f"FBGEMM's CPU backward needs features in the order of their tables; the features' tables are {order}"
        )
    numbers = {"learning_rate": LR, "eps": ADAM_EPS if rule == "adam" else EPS, "beta1": BETAS[0], "beta2": BETAS[1]}
    module = fbgemm_training_module(spec, device, rules[rule], **numbers, stochastic_rounding=False)
    tables: list[Tensor] = [rows.detach() for rows in module.split_embedding_weights()]
    make_gradients, sequence = gradients_of(spec), spec.features[0].kind.shape is Shape.SEQUENCE
    weighted = spec.features[0].weighted

    def prepare(batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        gradients = make_gradients(batch)
        gradient = torch.cat(gradients.by_feature) if sequence else gradients.joint
        return fbgemm_arguments(batch, weighted, device), gradient.to(device)

    def run(prepared: tuple[tuple[Tensor, ...], Tensor]) -> None:
        arguments, gradient = prepared
        module(*arguments).backward(gradient)

    note = f"training TBE, {rules[rule]}, no bounds check, no stochastic rounding"
    return Trainee("fbgemm", note, rule, prepare, run, lambda index, at: tables[index][at])


def _torch_trainee(spec: CollectionSpec, rule: str, device: str, *, sparse: bool) -> Trainee:
    weights = {t.name: nn.Parameter(filled_rows(spec, index, device)) for index, t in enumerate(spec.tables)}
    modules: list[nn.Module] = []
    for feature in spec.features:
        modules.append(torch_module(feature, weights[feature.table], sparse=sparse, freeze=False))
        modules[-1].weight = weights[feature.table]  # the same Parameter for features that share a table
    # torch's fastest optimizers; they take no sparse gradients, and its fused SGD gets narrow tables wrong (measured).
    fused = not sparse and all(t.dtype == "fp32" for t in spec.tables)
    optimizer, formula = _torch_optimizer(rule, list(weights.values()), fused=fused)
    pooled = all(f.kind.pooled for f in spec.features)
    make_gradients = gradients_of(spec)

    def prepare(batch: Batch) -> Calls:
        arguments = [torch_arguments(spec, batch, index, device) for index in range(len(spec.features))]
        gradients = make_gradients(batch)
        # A gradient has the type of its output: the table's type, or the widest of several that torch.cat joins.
        types = [weights[f.table].dtype for f in spec.features]
        joint = gradients.joint.to(device, reduce(torch.promote_types, types))
        by_feature = tuple(g.to(device, t) for g, t in zip(gradients.by_feature, types, strict=True) if not pooled)
        return list(zip(modules, arguments, strict=True)), Gradients(joint, by_feature)

    def run(prepared: Calls) -> None:
        calls, gradients = prepared
        results = [module(*arguments) for module, arguments in calls]
        if pooled:
            (torch.cat(results, 1) if len(results) > 1 else results[0]).backward(gradients.joint)
        else:
            torch.autograd.backward(results, gradients.by_feature)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    stand_in = " (nearest: torch has no row-wise Adagrad)" if rule == "rowwise_adagrad" else ""
    kind = "sparse" if sparse else "dense"
    note = f"one nn.EmbeddingBag per feature, {kind} gradients, torch.optim.{type(optimizer).__name__}{stand_in}"
    tables = [weights[t.name].detach() for t in spec.tables]
    return Trainee("torch", note, formula, prepare, run, lambda index, at: tables[index][at])


def _torch_optimizer(rule: str, weights: list[nn.Parameter], *, fused: bool) -> tuple[torch.optim.Optimizer, str]:
    """The torch optimizer for a rule, and the name of the formula that it follows."""
    if rule == "sgd":
        return torch.optim.SGD(weights, lr=LR, fused=fused), "sgd"
    if rule == "adam":
        return torch.optim.SparseAdam(weights, lr=LR, betas=BETAS, eps=ADAM_EPS), "sparse_adam"
    return torch.optim.Adagrad(weights, lr=LR, eps=EPS, fused=fused), "adagrad"


def _named(trainee: Trainee) -> Trainee:
    """The same contender with its note as its name, so that two kinds of one library can be timed together."""
    return Trainee(trainee.note, trainee.note, trainee.formula, trainee.prepare, trainee.run, trainee.rows)
