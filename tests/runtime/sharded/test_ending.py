"""The process groups of sharded modules end with the program, and with a module that is dropped."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from support.sharded.ending_program import exit_codes
from support.sharded.mix import batch_of, made, step

BUSY_LOOPS = 4


def test_a_program_without_destroy_process_group_ends_well() -> None:
    """Before groups were ended, 2 of 6 runs had a rank that died by SIGABRT; the soak makes a hundred runs."""
    assert exit_codes(3) == [0, 0, 0]


@pytest.mark.soak
def test_a_hundred_programs_on_a_loaded_machine_end_well() -> None:
    with _load():
        assert [exit_codes(3) for _ in range(100)] == [[0, 0, 0]] * 100


def test_a_dropped_module_gives_its_groups_back(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        before = set(_groups())
        module = made()
        step(module, batch_of(1, 3))
        assert set(_groups()) > before
        del module
        gc.collect()
        assert set(_groups()) == before
        kept = made()
        kept.close()
        assert set(_groups()) == before
        kept.close()  # a second time does no harm
        last = made()
    finally:
        dist.destroy_process_group()
    del last  # its groups are gone already


def test_a_forked_child_leaves_the_groups_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        module = made()
        child = os.fork()
        if child == 0:
            module._ids._end()  # as `sys.exit` of a child would
            os._exit(len(_groups()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(_groups())
        step(module, batch_of(1, 3))
    finally:
        dist.destroy_process_group()


def _groups() -> list[str]:
    return list(dist.distributed_c10d._world.pg_names.values())


@contextmanager
def _load() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
