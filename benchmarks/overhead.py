"""What a call itself costs: one sample over 26 tables, in microseconds. `python -m benchmarks.overhead`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

import embforge as ef

TABLES, ROWS, DIM = 26, 1000, 16
ROUNDS, CALLS = 200, 50


def main() -> None:
    """Prints the median of a forward and of a training step (forward, backward and update), taken in turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of {CALLS} calls each (default {ROUNDS})")
    rounds = parser.parse_args().rounds
    calls = {"forward": forward_call(), "training step": training_call()}
    for name, times in measured(calls, rounds).items():
        quartiles = statistics.quantiles(times, n=4)
        print(f"{name:14} {quartiles[1]:7.1f} µs   (quartiles {quartiles[0]:.1f} to {quartiles[2]:.1f})")


def measured(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call, the median of each round: a mean would hold the times in which others had the CPU.

    Rounds alternate, so that a disturbance hits all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            median = statistics.median(_seconds(call) for _ in range(CALLS))
            if number:  # the first round builds and loads kernels
                times[name].append(median * 1e6)
    return times


def _seconds(call: Callable[[], None]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def forward_call() -> Callable[[], None]:
    """A lookup without gradients."""
    module, (values, offsets) = ef.EmbeddingCollection(one_sample_spec()), one_sample()

    def call() -> None:
        with torch.no_grad():
            module(values, offsets)

    return call


def training_call() -> Callable[[], None]:
    """A forward, its backward and the update of 26 rows."""
    module = ef.EmbeddingCollection(one_sample_spec(), optimizer=ef.optim.RowwiseAdagrad(lr=0.01))
    (values, offsets), gradient = one_sample(), torch.ones(1, TABLES * DIM)

    def call() -> None:
        module(values, offsets).backward(gradient)

    return call


def one_sample_spec() -> ef.CollectionSpec:
    """26 tables that fit a cache, one feature each."""
    tables = [ef.TableSpec(f"t{i}", ROWS, DIM) for i in range(TABLES)]
    return ef.CollectionSpec(tables, [ef.FeatureSpec(f"f{i}", f"t{i}") for i in range(TABLES)])


def one_sample() -> tuple[torch.Tensor, torch.Tensor]:
    """One id per feature, and their offsets."""
    return torch.arange(TABLES) * 37 % ROWS, torch.arange(TABLES + 1)


if __name__ == "__main__":
    main()
