"""`embforge bench --train`: times a spec's training step, the same step of other libraries, and the machine's limits.

A step is forward, backward and update. All contenders get the same gradients and start from the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import EmbforgeError
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.collection import EmbeddingCollection
from embforge.tuner.bench.forward import (
    SWEEP_SHARE,
    NotedContender,
    Subject,
    check_device,
    enough_batches,
    filled_module,
    tables_of,
    timed,
)
from embforge.tuner.bench.limit import gather_limit
from embforge.tuner.bench.peers import PEERS, PeerUnavailableError
from embforge.tuner.bench.report import GATHER_LIMIT, OURS, BenchReport
from embforge.tuner.bench.training_peers import training_peer_named
from embforge.tuner.bench.training_rules import (
    ADAM_EPS,
    BETAS,
    EPS,
    LR,
    RULES,
    Checked,
    Gradients,
    Trainee,
    check,
    gradients_of,
)
from embforge.tuner.bench.update_limit import update_limit
from embforge.tuner.workload.tensors import input_of
from embforge.tuner.workload.workload import Batch, Workload, make_batch, parse

CHECK_BATCH = 64
"""Samples in each of the two steps that are compared with the rule's formula, or fewer if the workload has fewer."""
OUR_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": LR}),
    "adagrad": ("Adagrad", {"lr": LR, "eps": EPS}),
    "rowwise_adagrad": ("RowwiseAdagrad", {"lr": LR, "eps": EPS}),
    "adam": ("Adam", {"lr": LR, "betas": BETAS, "eps": ADAM_EPS}),
}


class UnknownRuleError(EmbforgeError, ValueError):
    """The training benchmark does not have this rule. The message lists the rules that it has."""


def bench_training(
    spec: CollectionSpec,
    rule: str,
    *,
    on: str = "cpu",
    against: Sequence[str] = PEERS,
    workload: Workload | str | None = None,
    seconds: float = 10.0,
    ours: bool = True,
    limit: bool = True,
    seed: int = 0,
) -> BenchReport:
    """Times training steps for about `seconds`, interleaved with the peers in `against` and the machine's limits.

    A peer that is not installed or cannot train the spec by the rule is in the report's `skipped`. `UnknownRuleError`
    for a rule not in `RULES`; `ToolchainError` if `on` is "cuda" and no CUDA device is usable; `WorkloadError` for a
    workload string that cannot be read.
    """
    if rule not in RULES:
        raise UnknownRuleError(f"rule {rule!r} is not known to the benchmark; allowed: {', '.join(RULES)}")
    check_device(on)
    workload = parse(workload) if isinstance(workload, str) else workload or Workload()
    batches = enough_batches(spec, workload, seed)
    module = our_module(spec, rule, on) if ours else None
    steps = [make_batch(spec, workload.at_most(CHECK_BATCH), seed + step) for step in range(2)]
    trainees: list[Trainee] = []
    checked: dict[str, Checked] = {}
    skipped: dict[str, str] = {}
    if module is not None:
        trainees.append(our_trainee(module, rule, on))
        checked[OURS] = check(trainees[0], spec, steps)
    for name in against:
        try:
            peer = training_peer_named(name, spec, rule, batches, on)
            checked[name] = check(peer, spec, steps)
            trainees.append(peer)
        except PeerUnavailableError as error:
            skipped[name] = str(error)
        except NotImplementedError as error:  # torch raises it if an operator does not support a type
            skipped[name] = f"no such peer: {str(error).splitlines()[0]}"
    contenders: list[NotedContender] = [*trainees]
    if limit and target_named(on).is_native:
        tables = tables_of(spec, module)
        limits = update_limit(spec, tables), gather_limit(spec, tables, name=GATHER_LIMIT)
        contenders += [untuned.best(batches, seconds * SWEEP_SHARE / 2) for untuned in limits]
    return timed(
        Subject(spec, str(workload), on, batches),
        contenders,
        seconds=seconds,
        seed=seed,
        differences={name: result.difference for name, result in checked.items()},
        disagreeing=tuple(name for name, result in checked.items() if not result.agrees),
        skipped=skipped,
        train=rule,
    )


def our_module(spec: CollectionSpec, rule: str, device: str = "cpu") -> EmbeddingCollection:
    """A module that trains by the rule and starts from the same rows as the peers."""
    import embforge

    name, numbers = OUR_RULES[rule]
    return filled_module(spec, device=device, optimizer=getattr(embforge.optim, name)(**numbers))


def our_trainee(module: EmbeddingCollection, rule: str, device: str = "cpu") -> Trainee:
    """Our training step as a contender."""
    make_gradients = gradients_of(module.spec)
    pooled = not module.layout.sequence_features
    names = [table.name for table in module.spec.tables]

    def prepare(batch: Batch) -> tuple[tuple[Tensor, Tensor, Tensor | None], Gradients]:
        gradients = make_gradients(batch)
        return input_of(batch, device)[:3], Gradients(
            gradients.joint.to(device), tuple(gradient.to(device) for gradient in gradients.by_feature)
        )

    def run(prepared: tuple[tuple[Tensor, Tensor, Tensor | None], Gradients]) -> None:
        arguments, gradients = prepared
        if pooled:
            module(*arguments).backward(gradients.joint)
        else:
            torch.autograd.backward(list(module.forward_dict(*arguments).values()), gradients.by_feature)

    note = f"{module.plan().uri}, then its backward with {OUR_RULES[rule][0]}"
    return Trainee(OURS, note, rule, prepare, run, lambda index, at: module.weight(names[index]).data[at])
