"""Real process groups for tests: runs a function on every rank of a gloo group of new processes.

Processes are forked from a server that has imported torch once, so a rank starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 600.0
GROUP_TIMEOUT = timedelta(seconds=TIMEOUT)
"""Seconds after which the ranks of a test are taken to hang."""
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",  # and DTensor with sympy, which many ranks would import, each by itself
    "numpy",
    "embforge.sharded.collection",
    "embforge.launch.cpu.backward",
]


class RankFailure(AssertionError):
    """A rank raised an error. The message is its traceback."""


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIMEOUT,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Calls `work(rank, size, *arguments)` on every rank of a new gloo group, and returns the results by rank.

    `RankFailure` with the traceback of the first rank that raised, or if one hung or died.
    """
    results = start_ranks(size, work, *arguments, timeout=timeout, environment=environment)
    failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(results) if not good]
    if failures:
        raise RankFailure("\n".join(failures))
    return [value for _, value in results]


def start_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIMEOUT,
    environment: dict[str, str] | None = None,
) -> list[tuple[bool, Any]]:
    """Like `run_ranks`, but failures are results: (True, value) or (False, traceback) for every rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    inherited = {name: value for name, value in os.environ.items() if name.startswith("EMBFORGE_")}
    inherited |= environment or {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, size, Path(folder) / "store", inherited, pipes[rank][1], work, arguments),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [_answer(process, pipe[0], timeout) for process, pipe in zip(ranks, pipes, strict=True)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _answer(process: Any, receiver: Connection, timeout: float) -> tuple[bool, Any]:
    if not receiver.poll(timeout):
        return False, f"no answer within {timeout} s: it hangs"
    try:
        answer: tuple[bool, Any] = receiver.recv()
    except EOFError:
        process.join()
        return False, f"died with exit code {process.exitcode}"
    return answer


def _rank(
    rank: int, size: int, store: Path, environment: dict[str, str], sender: Connection, work: Any, arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    try:
        sender.send((True, work(rank, size, *arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
