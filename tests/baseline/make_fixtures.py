"""Writes the fixtures: `PYTHONPATH=tests python -m baseline.make_fixtures [NAME ...]`, from the repository's root.

The checked-in files were written by the version before the refactoring and stay unchanged. A later version adds
fixtures of its own under new names (a writer here, a meaning in `fixture_files.py`) and writes those alone.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import embforge as ef
from baseline import fixture_files as files
from baseline import internals
from baseline.drawing import KINDS, batch_of
from baseline.fixture_files import EXPECTED, FOLDER, SERVED, SHARDED
from baseline.sharded_results import RANKS, shard_plan, sharded_module, sharded_step
from baseline.specs import HALF, MIX, NARROW, ONE, REMAPPED, RULES

EVERY_FIELD = """# Every field of a spec, numbers and formats in all their spellings.
name = "every-field"
output_dtype = "half"

[[table]]
name = "users"
num_embeddings = 1_000_000
embedding_dim = 33
dtype = "torch.bfloat16"
storage = "static"

[[table]]
name = "items.2"
num_embeddings = 0x40
embedding_dim = 4
dtype = "float8_e4m3fn"

[[feature]]
name = "clicks"
table = "users"
pooling = "mean"
weighted = true
hotness = 20
padding_idx = 0

[[feature]]
name = "last"
table = "items.2"
pooling = "concat"
hotness = 3
padding_idx = -1

[[feature]]
name = "rows"
table = "items.2"
pooling = "none"

[[feature]]
name = "best"
table = "users"
pooling = "max"

[[feature]]
name = "norm"
table = "users"
pooling = "sqrtn"
"""


def specs() -> Any:
    """Spec files: one written by hand, the others by `to_toml`."""
    (FOLDER / "specs").mkdir(exist_ok=True)
    (FOLDER / "specs" / "every_field.toml").write_text(EVERY_FIELD, encoding="utf-8")
    for spec in (MIX, HALF):
        (FOLDER / "specs" / f"{spec.name}.toml").write_text(spec.to_toml(), encoding="utf-8")
    return {path.name: files.spec_meaning(path) for path in sorted((FOLDER / "specs").iterdir())}


def plans() -> Any:
    """Texts of plans of every op and target, of programs in traced graphs and of lookups in exported ones."""
    texts: dict[str, Any] = {"plans": {}, "programs": {}, "exported": {}}
    for target, arch in (("cpu", "generic"), ("cuda", "sm_90"), ("simt", "sm_90"), ("reference", "any")):
        made = internals.kernel_plans(SERVED, target, arch, RULES["adam decoupled clipped"], accumulate=True)
        texts["plans"] |= {f"{target} {name}": plan.text for name, plan in made.items()}
    other = ef.CpuParams(prefetch_bytes=1024, tile_vectors=4, stores="streaming")
    tuned = internals.kernel_plans(HALF, "cpu", "avx512", RULES["signum"], id_dtype="int32", params=other)
    texts["plans"] |= {f"cpu, other fields, {name}": plan.text for name, plan in tuned.items()}
    for target, arch in (("cpu", "generic"), ("reference", "any")):
        forward = internals.kernel_plans(SERVED, target, arch)["forward"]
        texts["programs"][target] = internals.program_text(forward)
    rules = [internals.kernel_plans(SERVED, "cpu", "generic", RULES[name])["backward"] for name in ("adam", "lamb")]
    texts["grouped"] = internals.grouped_program_text(rules)
    texts["exported"]["cpu"] = internals.exported_text(SERVED, "cpu", None, None)
    texts["exported"]["cpu, fields given"] = internals.exported_text(SERVED, "cpu", other, 512)
    texts["exported"]["reference"] = internals.exported_text(SERVED, "reference", None, None)
    (FOLDER / "plans.json").write_text(json.dumps(texts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return {
        "plans": {name: files.plan_meaning(text) for name, text in texts["plans"].items()},
        "grouped": internals.parts_of_grouped(texts["grouped"]),
        "exported": {name: files.exported_meaning(text) for name, text in texts["exported"].items()},
        "lookup": files.lookup_by_operator(texts["programs"]["reference"]),
    }


def serving() -> Any:
    """An exported program."""
    from baseline.drawing import Numbers

    model, numbers = files.Served(), Numbers(41)
    with torch.no_grad():
        for table in SERVED.tables:
            rows = model.embeddings.weight(table.name)
            rows.copy_(numbers.real(*rows.shape))
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, {1: dynamic}, {0: dynamic})
    exported = torch.export.export(model, files.served_arguments(0), dynamic_shapes=shapes)
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names files of the machine that exports
    torch.export.save(exported, FOLDER / "serving.pt2")
    return {"torch": str(torch.__version__).split("+")[0], "results": files.served_results(model)}


def states() -> Any:
    """State dicts of a trained module and its optimizer."""
    module = files.trained_module()
    files.train_on(module, range(2))
    assert module.optimizer is not None
    saved = {"module": module.state_dict(), "optimizer": module.optimizer.state_dict()}
    torch.save(saved, FOLDER / "state.pt")
    return files.state_meaning(FOLDER / "state.pt")


def remapped() -> Any:
    """A spec with remapped tables, the texts of its resolve step, and the state dict of a trained module."""
    folder = FOLDER / "remapped"
    folder.mkdir(exist_ok=True)
    (folder / "spec.toml").write_text(REMAPPED.to_toml(), encoding="utf-8")
    texts: dict[str, dict[str, str]] = {"plans": {}, "exported": {}}
    for target, arch in (("cpu", "generic"), ("cuda", "sm_90"), ("simt", "sm_90"), ("reference", "any")):
        texts["plans"][target] = internals.kernel_plans(REMAPPED, target, arch)["resolve"].text
    for target in ("cpu", "reference"):
        texts["exported"][target] = internals.exported_resolve_text(REMAPPED, target)
    (folder / "plans.json").write_text(json.dumps(texts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    module = files.remapped_module(known=True)
    files.train_on(module, range(2), REMAPPED)
    torch.save(module.state_dict(), folder / "state.pt")
    return files.remapped_meaning(folder)


def sharded_states() -> Any:
    """State dicts of every rank of a trained sharded module."""
    internals.run_ranks(RANKS, _save_on_rank, str(FOLDER))
    return files.sharded_meaning(FOLDER)


def _save_on_rank(rank: int, size: int, folder: str) -> None:
    module = sharded_module(SHARDED, "reference")
    for step in range(2):
        sharded_step(module, rank, step)
    torch.save(module.state_dict(), Path(folder) / f"sharded_rank{rank}.pt")


def tuned() -> Any:
    """Results in the form of a store, one file each."""
    forward = internals.tuned_record(MIX, "forward", None, asdict(files_params()))
    backward = internals.tuned_record(MIX, "backward", "sgd", asdict(internals.BackwardParams(radix_bits=8)))
    shutil.rmtree(FOLDER / "tuned", ignore_errors=True)
    for record in (forward, backward):
        internals.save_tuned(record, FOLDER / "tuned")
    os.environ["EMBFORGE_TUNED_DIR"] = str(FOLDER / "tuned")
    return files.tuned_meaning()


def files_params() -> ef.CpuParams:
    """What the tuned forward runs with."""
    return ef.CpuParams(prefetch_bytes=1024, tile_vectors=4, threads=2)


def studies() -> Any:
    """A study of five trials in each kind of file."""
    with tempfile.TemporaryDirectory() as folder:
        database, journal = Path(folder) / "studies.sqlite3", Path(folder) / "studies.log"
        for url in (str(database), f"journal://{journal}"):
            internals.run_study(url, ONE, most=5)
        packed = gzip.compress(internals.database_bytes(database), mtime=0)
        (FOLDER / "studies.sqlite3.gz").write_bytes(packed)
        shutil.copy(journal, FOLDER / "studies.log")
        return internals.study_outcomes(str(database))


def oracle() -> Any:
    """A space of which every point was measured."""
    internals.write_oracle_file(FOLDER / "oracle.json")
    return internals.oracle_in_file(FOLDER / "oracle.json")


def trace() -> Any:
    """Batches that a module was called with."""
    module = ef.EmbeddingCollection(NARROW, backend="reference")
    with ef.record(module, FOLDER / "trace.npz"), torch.no_grad():
        for seed, kind in enumerate(KINDS[:3]):
            batch = batch_of(NARROW, kind, seed)
            module(batch.values, batch.offsets, batch.weights)
    return files.trace_meaning(FOLDER / "trace.npz")


def rule_and_shard_plan() -> Any:
    """A rule's JSON file, as `--train` takes it, and a shard plan's."""
    rule = RULES["signum"].update.to_dict()
    (FOLDER / "rule.json").write_text(json.dumps(rule, indent=1) + "\n", encoding="utf-8")
    plan = shard_plan().to_dict()
    (FOLDER / "shard_plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return {"rule": rule, "plan": plan}


def cache_entry() -> Any:
    """The directory of one CPU kernel in the cache."""
    plan = files.kernels_of_one()["cpu forward"]
    folder = FOLDER / "cache_entry"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(internals.compiled_entry(plan), folder)
    return {"uri": plan.uri, "key": json.loads((folder / "entry.json").read_text())["key"]}


def manifest() -> Any:
    """The manifest that `embforge gen` writes; the sources next to it are not kept."""
    plans_of_one = files.kernels_of_one()
    with tempfile.TemporaryDirectory() as folder:
        internals.gen(list(plans_of_one.values()), Path(folder))
        shutil.copy(Path(folder) / "manifest.json", FOLDER / "manifest.json")
    return {name: plan.uri for name, plan in plans_of_one.items()}


WRITERS: dict[str, Callable[[], Any]] = {
    writer.__name__: writer
    for writer in (
        specs, plans, serving, states, remapped, sharded_states, tuned, studies, oracle, trace, rule_and_shard_plan,
        cache_entry, manifest,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    """Writes the named fixtures, or all."""
    FOLDER.mkdir(exist_ok=True)
    meanings = files.expected() if EXPECTED.exists() else {}
    with tempfile.TemporaryDirectory() as nothing:
        os.environ.update(EMBFORGE_TUNED_DIR=nothing, EMBFORGE_SHIPPED_DIR=nothing)
        for name in names or WRITERS:
            meanings[name] = WRITERS[name]()
            print(name)
    EXPECTED.write_text(json.dumps(meanings, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
