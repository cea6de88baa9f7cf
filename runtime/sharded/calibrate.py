"""Measures this machine for the cost model of shard plans: how fast rows are read and updated, and how fast ranks
exchange bytes. `embforge plan --calibrate` calls it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from embforge.codegen.errors import PlanError
from embforge.codegen.planner.topology import LOCAL, Link, Topology
from embforge.codegen.tuned.hardware import gpu_hardware, this_cpu

Progress = Callable[[str, int, int], None]
"""A function that is called with the present work, the number of its completed steps, and the number of all its
steps."""
ROW_FLOATS = 64
SMALL, LARGE = 1024, 2**22
"""The bytes that a rank sends in the two exchanges from which latency and bandwidth are computed."""
TRIES = 5
"""How often the exchanges are timed, each time with twice as many repeats, while the machine is so busy that their
times hardly differ."""


def calibrate(
    ranks: int | None = None, *, table_bytes: int = 2**28, repeats: int = 15, progress: Progress = lambda *_: None
) -> Topology:
    """Measures this machine as one node: its GPUs with NCCL, or, if it has too few, `ranks` processes with gloo (None:
    one process per CPU, from 2 to 8).

    Times are medians, taken while all ranks work at the same time. Rails to other machines are not measured: they are
    taken to be as fast as the links inside, and `source` of the result says so.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = ranks or (gpus if gpus > 1 else min(8, max(2, os.cpu_count() or 2)))
    on_gpus = gpus >= count
    if count < 2:
        raise PlanError(f"calibration: {count} ranks; allowed: 2 or more, because a single rank exchanges nothing")
    with tempfile.TemporaryDirectory() as folder:
        progress(f"starting {count} processes", 0, 1)
        context = start_processes(
            _rank, (count, folder, on_gpus, table_bytes, repeats), nprocs=count, join=False, start_method=_method()
        )
        assert context is not None
        while not context.join(timeout=0.1):
            done = len(list(Path(folder).glob("step-*")))
            progress(f"measuring on {count} {'GPUs' if on_gpus else 'processes'}", done, STEPS)
        measured: dict[str, float] = torch.load(Path(folder) / "measured.pt")
    return _topology(measured, count, on_gpus)


STEPS = 5
"""The number of measurements."""


def _topology(measured: dict[str, float], count: int, on_gpus: bool) -> Topology:
    hardware = this_cpu().identity
    memory = float(_host_memory() / count)
    what = f"{count} processes with gloo"
    if on_gpus:
        from embforge.device_facts import gpu_facts

        hardware = gpu_hardware(gpu_facts(torch.device("cuda", 0))).identity
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        what = f"{count} GPUs with NCCL"
    if not _differ(measured):
        raise PlanError(
            f"calibration: {TRIES} times, an exchange of {LARGE} bytes ({measured['large']:.3g} s) took hardly longer "
            f"than one of {SMALL} ({measured['small']:.3g} s): other programs use this machine; calibrate again when "
            "it is quiet"
        )
    # The bandwidth is the slope of the line through both times; the time of the small exchange is the latency.
    link = Link((LARGE - SMALL) / (measured["large"] - measured["small"]), measured["small"])
    day = datetime.now(UTC).date().isoformat()
    return Topology(
        name=LOCAL,
        nodes=1,
        ranks_per_node=count,
        memory=memory,
        lookup_bandwidth=measured["lookup"],
        update_bandwidth=measured["update"],
        node_link=link,
        rail=link,
        launch=measured["launch"],
        usable=0.9 if on_gpus else 0.5,
        measured=True,
        source=f"measured on {day}: {what}, all at once; rails are not measured and count as links inside the node",
        hardware=tuple(hardware.items()),
    )


def _rank(rank: int, count: int, folder: str, on_gpus: bool, table_bytes: int, repeats: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=store, rank=rank, world_size=count)
    try:
        clock = _Clock(device, repeats, Path(folder) if rank == 0 else None)
        measured = _memory(clock, table_bytes // count) | _links(clock, count)
        if rank == 0:
            torch.save(measured, Path(folder) / "measured.pt")
    finally:
        dist.destroy_process_group()


class _Clock:
    """Times calls that all ranks make at the same time."""

    def __init__(self, device: torch.device, repeats: int, folder: Path | None) -> None:
        self.device, self.repeats, self.folder = device, repeats, folder
        self.steps = 0

    def seconds(self, call: Callable[[], object]) -> float:
        """The median over repeats of the slowest rank's time."""
        times = []
        for _ in range(self.repeats + 2):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float32, device=self.device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times.append(float(spent))
        if self.folder is not None and self.steps < STEPS:
            (self.folder / f"step-{self.steps}").touch()
        self.steps += 1
        return median(times[2:])


def _memory(clock: _Clock, table_bytes: int) -> dict[str, float]:
    """Measures how many bytes per second of scattered rows are read and updated, counted as the cost model counts
    them, and the time of a launch."""
    rows = max(1024, table_bytes // (4 * ROW_FLOATS))
    table = torch.zeros(rows, ROW_FLOATS, dtype=torch.float32, device=clock.device)
    count = min(rows, 2**16)
    ids = torch.randint(rows, (count,), dtype=torch.int64, device=clock.device)
    gradient = torch.ones(count, ROW_FLOATS, dtype=torch.float32, device=clock.device)
    out = torch.empty(count, ROW_FLOATS, dtype=torch.float32, device=clock.device)
    lookup = clock.seconds(lambda: torch.index_select(table, 0, ids, out=out))
    update = clock.seconds(lambda: table.index_add_(0, ids, gradient))
    tiny = torch.zeros(1, dtype=torch.float32, device=clock.device)
    launch = clock.seconds(lambda: tiny.add_(1))
    moved = 4 * ROW_FLOATS * count
    return {"lookup": 2 * moved / lookup, "update": 3 * moved / update, "launch": launch}


def _links(clock: _Clock, count: int) -> dict[str, float]:
    """Measures the seconds of an all-to-all with few bytes, and of one with many bytes."""
    spent: dict[str, float] = {}
    for _ in range(TRIES):  # all ranks see the same times, so they leave this loop together
        for name, bytes_ in (("small", SMALL), ("large", LARGE)):
            numbers = bytes_ // 4 // (count - 1) * count  # a rank does not send its own part
            sent = torch.zeros(numbers // count * count, dtype=torch.float32, device=clock.device)
            received = torch.empty_like(sent)
            spent[name] = clock.seconds(partial(_all_to_all, received, sent))
        if _differ(spent):
            break
        clock.repeats *= 2
    return spent


def _differ(spent: dict[str, float]) -> bool:
    """Whether the large exchange took enough longer than the small one to compute a bandwidth."""
    return spent["large"] > 1.1 * spent["small"]


def _all_to_all(received: Tensor, sent: Tensor) -> None:
    dist.all_to_all_single(received, sent)


def _method() -> str:
    """How processes are started: by a server that has imported torch once, if the system has fork servers."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    return "forkserver"


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
