"""What collections compute: lookups, and training by every rule, on one backend, as digests by result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import embforge as ef
from baseline.digests import Digests, digests_of
from baseline.drawing import KINDS, Batch, Kind, Numbers, batch_of, entries_of
from baseline.specs import HALF, LATER, MIX, NARROW, REMAPPED, RULES, WIDE

SEED = 0x5EED
USUAL_KINDS = tuple(kind for kind in KINDS if not kind.bad_ids)


@dataclass(frozen=True)
class ModuleCase:
    """A module and what is done with it."""

    name: str
    spec: ef.CollectionSpec
    run: Callable[[ModuleCase, str], Digests]
    optimizer: Any = None
    ids: torch.dtype = torch.int64
    options: tuple[tuple[str, Any], ...] = ()
    """The options of the module."""
    kinds: tuple[Kind, ...] = KINDS

    def module(self, backend: Any, **more: Any) -> ef.EmbeddingCollection:
        options = {"bounds_check": "zero", "remap": entries_of(self.spec, 5), **dict(self.options), **more}
        return ef.EmbeddingCollection(self.spec, backend=backend, optimizer=self.optimizer, **options)

    def batches(self) -> Iterable[Batch]:
        for seed, kind in enumerate(self.kinds):
            yield batch_of(self.spec, kind, seed, self.ids)


def lookups(case: ModuleCase, backend: str) -> Digests:
    """By feature: results of plain and special rows, with bad ids taken as absent and with good ones checked."""
    module = case.module(backend)
    found = []
    with torch.no_grad():
        for draw in ("real", "special"):
            numbers = Numbers(1)
            for table in case.spec.tables:
                rows = getattr(numbers, draw)(table.num_embeddings, table.embedding_dim)
                module.weight(table.name).copy_(rows)
            found += [module.forward_dict(b.values, b.offsets, b.weights) for b in case.batches()]
        checked = case.module(backend, bounds_check="error")
        checked.load_state_dict(module.state_dict())
        for seed, kind in enumerate(USUAL_KINDS):
            batch = batch_of(case.spec, kind, 100 + seed, case.ids)
            found.append(checked.forward_dict(batch.values, batch.offsets, batch.weights))
    return digests_of(found)


def training(case: ModuleCase, backend: str) -> Digests:
    """By name: results of every step, gradients of weights and of tables that are parameters, rows and states."""
    module = case.module(backend)
    numbers = Numbers(2)
    with torch.no_grad():
        for table in case.spec.tables:
            module.weight(table.name).copy_(numbers.real(table.num_embeddings, table.embedding_dim))
    if case.optimizer is not None:
        module.seed(SEED)
    accumulates = dict(case.options).get("accumulate")
    found = []
    for number, batch in enumerate(case.batches()):
        found.append(_step(module, batch, numbers))
        if accumulates and number % 2:
            module.step()
    found.append({f"after: {name}": tensor for name, tensor in module.state_dict().items()})
    return digests_of(found)


def _step(module: ef.EmbeddingCollection, batch: Batch, numbers: Numbers) -> dict[str, Tensor]:
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    results = module.forward_dict(batch.values, batch.offsets, weights)
    found = {f"result: {name}": result.detach() for name, result in results.items()}
    wanted = [result for result in results.values() if result.requires_grad]
    gradients = [numbers.real(*result.shape).to(result.dtype) for result in wanted]
    torch.autograd.backward(wanted, gradients)
    module.check()
    if weights is not None and weights.grad is not None:
        found["gradient: weights"] = weights.grad
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
            if gradient.is_sparse:
                found[f"gradient: rows of {name}"] = gradient.indices()
            found[f"gradient: {name}"] = gradient.values() if gradient.is_sparse else gradient
            parameter.grad = None
    return found


BY_TABLE = {"a": RULES["adam"], "b": RULES["lamb"], "c": None}
CASES = (
    ModuleCase("lookup of mix", MIX, lookups),
    ModuleCase("lookup of half with int32 ids", HALF, lookups, ids=torch.int32),
    ModuleCase("lookup of wide", WIDE, lookups),
    ModuleCase("training of mix by adam", MIX, training, RULES["adam"]),
    ModuleCase("training of mix by adam, accumulated", MIX, training, RULES["adam"], options=(("accumulate", True),)),
    ModuleCase("sparse gradients of mix", MIX, training),
    ModuleCase("dense gradients of mix", MIX, training, options=(("sparse", False),)),
    ModuleCase("training of half by rowwise_adagrad", HALF, training, RULES["rowwise_adagrad"], ids=torch.int32),
    ModuleCase("training of wide by rowwise_adam", WIDE, training, RULES["rowwise_adam"]),
    ModuleCase("lookup of later", LATER, lookups),
    ModuleCase("training of later by adagrad", LATER, training, RULES["adagrad"]),
    ModuleCase("lookup of remapped", REMAPPED, lookups),
    ModuleCase("training of remapped by adam with int32 ids", REMAPPED, training, RULES["adam"], ids=torch.int32),
    ModuleCase("training of narrow by table", NARROW, training, BY_TABLE),
    *(ModuleCase(f"training of narrow by {name}", NARROW, training, rule) for name, rule in RULES.items()),
)
QUICK = {
    "lookup of mix": ("reference", "cpu"),
    "lookup of remapped": ("reference", "cpu"),
    "training of mix by adam": ("reference", "cpu", "simt"),
    "training of narrow by lamb": ("reference",),
}
"""By case: the backends on which `make test` runs it. Other kernels would take too long to compile there."""
