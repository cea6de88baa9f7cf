"""Trains a DLRM whose embedding tables are spread over ranks, on synthetic data with the shape of Criteo's.

    python examples/train_dlrm.py --steps 200                                         # one process
    torchrun --nproc-per-node 2 examples/train_dlrm.py --steps 200                    # two, on the CPU with gloo
    torchrun --nproc-per-node 8 examples/train_dlrm.py --device cuda --plan auto      # eight GPUs with NCCL

Dense layers are replicas under DistributedDataParallel; each of the 26 tables is on the ranks that the plan says.
`--batch-size` counts the samples of all ranks together, so the number of ranks changes only how fast the model trains:
the same seed gives the same curves except for rounding. Writes `metrics.jsonl` and `curves.svg` into `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from criteo_like import HELD_OUT, NUMBERS, Batch, CriteoLike
from curves import draw
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import embforge as ef
from embforge.codegen.planner.topology import load_topology
from embforge.sharded import Formats, PrefetchedBatches, ShardedEmbeddingCollection, ShardPlan

PLANS = ("auto", "data_parallel", "table_wise", "row_wise", "column_wise", "grid", "hierarchical")
OPTIMIZERS = ("SGD", "Momentum", "Adagrad", "RowwiseAdagrad", "Adam", "RowwiseAdam", "Ftrl", "LAMB")
FORMATS = ("fp32", "fp16", "bf16", "fp8", "int8")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a DLRM with sharded tables on synthetic Criteo-shaped data.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2048, help="samples per step, over all ranks together")
    parser.add_argument("--plan", choices=PLANS, default="auto")
    parser.add_argument("--topology", help="machines for --plan auto (default: laptop on CPUs, h100x8 on GPUs)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="RowwiseAdagrad", help="optimizer of the tables")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of the tables")
    parser.add_argument("--dense-lr", type=float, default=1e-3, help="learning rate of the dense layers (Adam)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--max-rows", type=int, default=50_000, help="most rows per table; larger ones are cut")
    parser.add_argument(
        "--formats",
        default="",
        metavar="FORWARD[,BACKWARD]",
        help=f"number formats of vectors and gradients between ranks: {', '.join(FORMATS)}",
    )
    parser.add_argument("--prefetch", action="store_true", help="exchange the next batch's ids while this one computes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=int, default=8, help="held-out batches of --batch-size")
    parser.add_argument("--out", type=Path, default=Path("runs/dlrm"))
    args = parser.parse_args(words)
    if min(args.steps, args.eval_every, args.batch_size, args.eval_batches) < 1:
        parser.error("--steps, --eval-every, --batch-size and --eval-batches: 1 at least")
    return args


class Dense(nn.Module):
    """A DLRM without its tables: an MLP for the numbers, dot products of all pairs of vectors, an MLP on top."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        pairs = (features + 1) * features // 2
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(features + 1, features + 1, -1), persistent=False)

    def forward(self, numbers: Tensor, embedded: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.cat([dense, embedded], 1).view(len(numbers), -1, dense.shape[1])
        products = vectors @ vectors.mT
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1))[:, 0]


class Trainer:
    """The tables, the dense part, and their training on this rank's share of every batch."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if args.batch_size % self.ranks:
            raise SystemExit(f"--batch-size {args.batch_size}: not divisible by {self.ranks} ranks")
        self.data = CriteoLike.capped(args.max_rows, args.seed)
        names = [f"C{number + 1}" for number in range(len(self.data.rows))]
        spec = ef.CollectionSpec(
            [ef.TableSpec(name, rows, args.dim) for name, rows in zip(names, self.data.rows, strict=True)],
            [ef.FeatureSpec(name, name, hotness=1) for name in names],
            name="criteo_like",
        )
        optimizer = getattr(ef.optim, args.optimizer)(lr=args.lr)
        self.plan = self._plan(spec, optimizer)
        # Each rank's loss is the mean of its own samples: averaged over ranks, as DDP does, it is the mean of all.
        self.tables = ShardedEmbeddingCollection(
            spec, self.plan, optimizer=optimizer, device=device, average_gradients=True, formats=self._formats()
        )
        self._start_alike(spec)
        torch.manual_seed(args.seed)
        self.dense: nn.Module = Dense(len(names), args.dim).to(device)
        if self.ranks > 1:
            self.dense = DistributedDataParallel(self.dense)
        self.dense_optimizer = torch.optim.Adam(self.dense.parameters(), lr=args.dense_lr)

    def _plan(self, spec: ef.CollectionSpec, optimizer: Any) -> ShardPlan:
        args = self.args
        if args.plan != "auto":
            plan: ShardPlan = getattr(ShardPlan, args.plan)(spec)
            return plan
        topology = load_topology(args.topology or ("h100x8" if args.device == "cuda" else "laptop"))
        batch_size = args.batch_size // self.ranks
        return ShardPlan.auto(
            spec, topology, world_size=self.ranks, batch_size=batch_size, update=optimizer.update, workload="zipf:1.05"
        )

    def _formats(self) -> Formats:
        forward, _, backward = self.args.formats.partition(",")
        return Formats(forward or None, backward or None)

    def _start_alike(self, spec: ef.CollectionSpec) -> None:
        """The same rows whatever the plan and the number of ranks. (The module has drawn rows already, shard by shard;
        tables that are too large to be drawn whole would keep those.)"""
        generator = torch.Generator().manual_seed(self.args.seed + 1)
        for table in spec.tables:
            shape = (table.num_embeddings, table.embedding_dim)
            bound = table.num_embeddings**-0.5
            self.tables.load_full({table.name: torch.empty(shape).uniform_(-bound, bound, generator=generator)})

    def batches(self, first: int, last: int) -> Iterator[tuple[Batch, Any]]:
        """This rank's samples of batches, with what `tables` is called with."""
        whole = self.data.batches(first, last, self.args.batch_size)
        mine = (batch.part(self.rank, self.ranks).to(self.device) for batch in whole)
        if self.args.prefetch:
            yield from PrefetchedBatches(self.tables, mine, ids_of)
        else:
            yield from ((batch, self.tables.distribute(*ids_of(batch))) for batch in mine)

    def train(self, first: int, last: int) -> Tensor:
        """Steps `first` to `last`; the mean loss of this rank's samples."""
        losses = []
        for batch, exchanged in self.batches(first, last):
            self.dense_optimizer.zero_grad(set_to_none=True)
            logits = self.dense(batch.numbers, self.tables(exchanged))
            loss = binary_cross_entropy_with_logits(logits, batch.labels)
            loss.backward()  # gradients go to the owners of rows, which update them here
            self.dense_optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and AUC of held-out samples, over all ranks."""
        found = [
            torch.stack([self.dense(batch.numbers, self.tables(exchanged)), batch.labels])
            for batch, exchanged in self.batches(HELD_OUT, HELD_OUT + self.args.eval_batches)
        ]
        mine = torch.cat(found, 1)
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        if self.ranks > 1:
            dist.all_gather(parts, mine)
        logits, labels = torch.cat(parts if self.ranks > 1 else [mine], 1)
        return binary_cross_entropy_with_logits(logits, labels).item(), auc(logits, labels)

    def over_ranks(self, value: Any) -> list[Any]:
        """Gathers a value from every rank."""
        found = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, value)
        return found


def ids_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The ids of all features, feature-major with one id per bag, and the offsets of the bags."""
    values = batch.ids.reshape(-1)
    return values, torch.arange(values.numel() + 1, device=values.device)


def auc(logits: Tensor, labels: Tensor) -> float:
    """The chance that a clicked sample scores above one that was not; equal scores count half."""
    clicked, others = logits[labels > 0.5], logits[labels <= 0.5].sort().values
    below = torch.searchsorted(others, clicked) + torch.searchsorted(others, clicked, right=True)
    return (below.double().mean() / 2 / max(1, others.numel())).item()


def run(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Trains and measures; rank 0 prints and writes."""
    trainer = Trainer(args, device)
    kinds = sorted({kind.name for _, kind in trainer.plan.kinds})
    title = f"DLRM, {trainer.ranks} rank(s), {args.plan} plan ({', '.join(kinds)}), {args.optimizer}"
    records: list[dict[str, Any]] = []
    for last in (*range(0, args.steps, args.eval_every), args.steps):
        begin = records[-1]["step"] if records else 0
        record: dict[str, Any] = {"step": last}
        if last:
            trainer.tables.reset_counters()
            clock = time.perf_counter()
            losses = trainer.over_ranks(trainer.train(begin, last).item())  # waits for the slowest
            seconds = time.perf_counter() - clock
            sent = trainer.over_ranks(trainer.tables.counters())
            record["loss"] = sum(losses) / trainer.ranks
            record["samples_per_s"] = (last - begin) * args.batch_size / seconds
            record["bytes_per_step"] = {
                name: sum(one.get(name, 0) for one in sent) / (last - begin) for name in sent[0] if trainer.ranks > 1
            }
        record["eval_loss"], record["auc"] = trainer.evaluate()
        records.append(record)
        if trainer.rank == 0:
            speed = f"{record['samples_per_s']:10,.0f} samples/s" if last else ""
            print(
                f"step {last:5d}  held out: loss {record['eval_loss']:.4f}  AUC {record['auc']:.4f}{speed}", flush=True
            )
    if trainer.rank == 0:
        write(args, title, records)
    return records


def write(args: argparse.Namespace, title: str, records: list[dict[str, Any]]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def line(name: str) -> list[tuple[float, float]]:
        return [(record["step"], record[name]) for record in records if name in record]

    panels = {
        "loss": {"training": line("loss"), "held out": line("eval_loss")},
        "AUC, held out": {"AUC": line("auc")},
        "samples/s, all ranks": {"samples/s": line("samples_per_s")},
    }
    subtitle = f"{args.batch_size} samples per step, dim {args.dim}, {args.device}, seed {args.seed}"
    (args.out / "curves.svg").write_text(draw(title, subtitle, panels, records[-1].get("bytes_per_step", {})))
    print(f"wrote {args.out / 'metrics.jsonl'} and {args.out / 'curves.svg'}")


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # not started by torchrun
        run(args, device)
        return
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        run(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
