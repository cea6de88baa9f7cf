"""A program of several ranks that trains two sharded collections and just ends, without `destroy_process_group`.

`python -m support.sharded.ending_program SIZE`, run in tests/, starts the ranks and prints their exit codes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def rank(number: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from support.sharded.mix import batch_of, made, step

    from embforge.sharded.exchange import waiting

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    modules = made(), made()
    for seed in range(2):
        for module in modules:
            step(module, batch_of(10 * seed + number, 3))
    # Makes often what happens on a loaded machine sometimes: gloo's threads are too late to drop the last tensors.
    waiting.SECONDS = 0.0
    sys.setswitchinterval(10)
    sizes = [8] * size
    for _ in range(20):
        for module in modules:
            for exchange in (module._ids, module._wires):
                exchange.all_to_all("ending", torch.ones(8 * size), sizes, sizes)


def exit_codes(size: int) -> list[int]:
    """Runs the program once and returns the exit code of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "support.sharded.ending_program", str(size), f"{folder}/store"]
        ranks = [subprocess.Popen([*command, str(number)], cwd=Path(__file__).parents[2]) for number in range(size)]
        return [process.wait() for process in ranks]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(*exit_codes(int(sys.argv[1])))
    else:
        rank(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])
