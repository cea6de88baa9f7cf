"""The fixtures, and what each one means. Every later version must find the same meaning as the one that wrote them.

A meaning is plain data. `make_fixtures.py` wrote the files and `expected.json`; `test_fixtures.py` compares.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import embforge as ef
from baseline import internals
from baseline.digests import Digests, digests_of
from baseline.drawing import KINDS, Batch, Numbers, batch_of, entries_of
from baseline.internals import run_ranks
from baseline.sharded_results import CASES as SHARDED_CASES
from baseline.sharded_results import RANKS, SPEC, sharded_module, sharded_step
from baseline.specs import MIX, NARROW, ONE, REMAPPED, RULES

FOLDER = Path(__file__).with_name("fixtures")
EXPECTED = FOLDER / "expected.json"
STUDIES = ("studies.sqlite3.gz", "studies.log")
SHARDED = SHARDED_CASES[0]
SERVED = ef.CollectionSpec(
    [ef.TableSpec("a", 30, 5), ef.TableSpec("b", 20, 4, "bf16")],
    [
        ef.FeatureSpec("sum", "a", weighted=True),
        ef.FeatureSpec("mean", "b", "mean", padding_idx=3),
        ef.FeatureSpec("rows", "a", "none"),
    ],
    name="served",
)
"""What the exported program looks up."""


class Served(nn.Module):
    """A model whose results are exact on every machine."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = ef.EmbeddingCollection(SERVED, backend="cpu")

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embeddings.forward_dict(ids, None, weights, lengths=lengths)
        return torch.cat((found["sum"], found["mean"]), 1) * 2, found["rows"]


def served_arguments(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths and weights."""
    batch = batch_of(SERVED, KINDS[0], seed)
    assert batch.weights is not None
    return batch.values, batch.offsets.diff().reshape(len(SERVED.features), -1), batch.weights


def served_results(model: Any) -> Digests:
    """The model's results."""
    with torch.no_grad():
        answers = [dict(zip(("pooled", "rows"), model(*served_arguments(seed)), strict=True)) for seed in range(3)]
    return digests_of(answers)


def lookup_by_operator(program: str) -> Digests:
    """What torch's operator computes where a graph calls it with this text."""
    numbers = Numbers(21)
    module = ef.EmbeddingCollection(SERVED, backend="reference")
    tables = []
    with torch.no_grad():
        for table in SERVED.tables:
            rows = module.weight(table.name)
            rows.copy_(numbers.real(*rows.shape))
            tables.append(rows.detach())
        found = []
        for seed in range(3):
            batch = batch_of(SERVED, KINDS[0], seed)
            size = len(KINDS[0].lengths)
            rows_of_sequence = int(batch.offsets[3 * size] - batch.offsets[2 * size])
            arguments = (batch.values, batch.offsets, batch.weights, tables, [rows_of_sequence], program, "error")
            found.append(dict(zip(("pooled", "rows"), torch.ops.embforge.lookup(*arguments), strict=True)))
    return digests_of(found)


def spec_meaning(path: Path) -> dict[str, Any]:
    """A spec as plain data, and the URI of one of its kernels, which is a hash of all that counts."""
    spec = ef.CollectionSpec.from_toml(path)
    plan = internals.kernel_plans(spec, "cpu", "generic")["forward"]
    assert ef.CollectionSpec.from_dict(spec.to_dict()) == spec
    return {"spec": spec.to_dict(), "uri": plan.uri}


def plan_meaning(text: str) -> dict[str, Any]:
    """A plan's URI, its symbol, and the URI without names, by which emitted kernels are found."""
    plan = internals.Plan.from_text(text)
    assert plan.text == text, "the canonical text of a plan has changed"
    return {"uri": plan.uri, "symbol": plan.symbol, "shape": plan.nameless.uri}


def exported_meaning(text: str) -> dict[str, Any]:
    """The fields of an exported lookup."""
    lookup = internals.exported_lookup(text)
    params = None if lookup.params is None else vars(lookup.params)
    data = {"target": lookup.target, "spec": lookup.spec.to_dict(), "params": params, "batch": lookup.batch_size}
    if lookup.op != "forward":
        data["op"] = lookup.op
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def trained_module() -> ef.EmbeddingCollection:
    """A module with an optimizer, not trained yet."""
    module = ef.EmbeddingCollection(NARROW, backend="reference", optimizer=RULES["adam decoupled clipped"])
    numbers = Numbers(31)
    with torch.no_grad():
        for table in NARROW.tables:
            module.weight(table.name).copy_(numbers.real(table.num_embeddings, table.embedding_dim))
    module.seed(9)
    return module


def train_on(module: Any, seeds: range, spec: ef.CollectionSpec = NARROW) -> Digests:
    """Trains further steps; digests of their results and of the last state."""
    numbers, found = Numbers(32 + seeds.start), []
    for seed in seeds:
        batch: Batch = batch_of(spec, KINDS[0], seed)
        results = module.forward_dict(batch.values, batch.offsets, batch.weights)
        torch.autograd.backward(
            list(results.values()), [numbers.real(*result.shape).to(result.dtype) for result in results.values()]
        )
        found.append({name: result.detach() for name, result in results.items()})
    return digests_of([*found, module.state_dict()])


def state_meaning(path: Path) -> Digests:
    """Digests of further training from a saved state."""
    saved = torch.load(path, weights_only=True)
    module = ef.EmbeddingCollection(NARROW, backend="reference", optimizer=RULES["adam decoupled clipped"])
    module.load_state_dict(saved["module"])
    assert module.optimizer is not None
    module.optimizer.load_state_dict(saved["optimizer"])
    return train_on(module, range(2, 4))


def remapped_module(*, known: bool) -> ef.EmbeddingCollection:
    """A module with remapped tables, whose entries are known or not."""
    module = ef.EmbeddingCollection(
        REMAPPED, backend="reference", optimizer=RULES["adam"], remap=entries_of(REMAPPED, 51) if known else None
    )
    numbers = Numbers(52)
    with torch.no_grad():
        for table in REMAPPED.tables:
            module.weight(table.name).copy_(numbers.real(table.num_embeddings, table.embedding_dim))
    module.seed(9)
    return module


def remapped_meaning(folder: Path) -> dict[str, Any]:
    """What a remapped spec, its texts and the state dict of a module say. The entries come from the state alone."""
    texts: dict[str, dict[str, str]] = json.loads((folder / "plans.json").read_text(encoding="utf-8"))
    module = remapped_module(known=False)
    saved = torch.load(folder / "state.pt", weights_only=True)
    module.load_state_dict(saved)
    return {
        **spec_meaning(folder / "spec.toml"),
        "plans": {name: plan_meaning(text) for name, text in texts["plans"].items()},
        "exported": {name: exported_meaning(text) for name, text in texts["exported"].items()},
        "keys": sorted(key for key in saved if "remap" in key),
        "training": train_on(module, range(2, 4), REMAPPED),
    }


def sharded_meaning(folder: Path) -> Digests:
    """Digests of further training of a sharded module from the saved states of its ranks."""
    found: Digests = {}
    for rank, digests in enumerate(run_ranks(RANKS, _sharded_on_rank, str(folder))):
        found |= {f"rank {rank}, {name}": digest for name, digest in digests.items()}
    return found


def _sharded_on_rank(rank: int, size: int, folder: str) -> Digests:
    module = sharded_module(SHARDED, "reference")
    module.load_state_dict(torch.load(Path(folder) / f"sharded_rank{rank}.pt", weights_only=True))
    results = sharded_step(module, rank, 2)
    return digests_of([results, {table.name: module.full(table.name) for table in SPEC.tables}])


def trace_meaning(path: Path) -> dict[str, Any]:
    """Traffic that was recorded, as a file and as batches that the tuner draws from it."""
    trace = internals.read_trace(path)
    batches = []
    for seed in range(3):
        batch = internals.workload_batch(NARROW, f"trace:{path}", seed)
        batches.append({"values": torch.from_numpy(batch.values), "offsets": torch.from_numpy(batch.offsets)})
    about = {"features": list(trace.features), "rows": list(trace.rows), "sizes": trace.sizes.tolist()}
    return {**about, "digest": trace.digest, **digests_of(batches)}


def tuned_meaning() -> dict[str, Any]:
    """The plan fields that the stores give: for the measured hardware, for similar hardware, and for other hardware."""
    near, far = internals.near_and_far_hardware()
    found: dict[str, Any] = {}
    for name, hardware in (("same", internals.HARDWARE), ("near", near), ("far", far)):
        for op, rule in (("forward", None), ("backward", "sgd")):
            params, why = internals.chosen(MIX, op, rule, hardware)
            found[f"{op}, {name} hardware"] = {"params": vars(params), "why": why}
    return found


def study_file(name: str, folder: Path) -> str:
    """The URL of a copy of a fixture study."""
    if name.endswith(".gz"):
        path = folder / name.removesuffix(".gz")
        path.write_bytes(gzip.decompress((FOLDER / name).read_bytes()))
        return str(path)
    shutil.copy(FOLDER / name, folder / name)
    return f"journal://{folder / name}"


def expected() -> dict[str, Any]:
    """What every fixture meant to the version that wrote it."""
    data: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return data


def kernels_of_one() -> dict[str, Any]:
    """The plans whose manifest and cache entry are kept."""
    cuda = internals.kernel_plans(ONE, "cuda", "sm_90", RULES["sgd"])
    cpu = internals.kernel_plans(ONE, "cpu", "generic", RULES["sgd"])
    return {f"{target} {name}": plan for target, of in (("cuda", cuda), ("cpu", cpu)) for name, plan in of.items()}
