"""Builders killed at any moment leave a cache that the next one can use."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embforge.codegen import cache

BUILDER = """
import random, sys, time
from embforge.codegen import cache

def compile_(path):
    time.sleep(random.uniform(0, 0.05))
    return b"binary of " + path.read_bytes() + b"." * 1_000_000

number = 0
while True:
    number += 1
    source = f"source {number % 5}"
    key = cache.key_of({"source": source})
    recipe = cache.Recipe(f"forward_soak_{number % 5}", key, source, ".cu", ".cubin", compile_)
    entry, _ = cache.fetch(recipe)
    whole = b"binary of " + source.encode() + b"." * 1_000_000
    # Half a build is never seen; what another builder damages below, between our fetch and this read, may be.
    assert entry.binary.read_bytes() in (whole, b"damaged", b"")
    if random.random() < 0.2:
        entry.binary.write_bytes(b"damaged")
    if random.random() < 0.2:
        (entry.directory / "entry.json").unlink(missing_ok=True)
"""


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs Linux")
def test_killed_builders_leave_a_usable_cache(fresh_cache: Path) -> None:
    random.seed(1)
    deadline = time.monotonic() + 60
    workers: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < deadline:
        while len(workers) < 4:
            workers.append(subprocess.Popen([sys.executable, "-c", BUILDER]))
        time.sleep(random.uniform(0.3, 1.0))
        victim = workers.pop(0)
        os.kill(victim.pid, signal.SIGKILL)
        assert victim.wait(10) == -signal.SIGKILL
    for worker in workers:
        worker.kill()
        worker.wait(10)
    for number in range(5):
        source = f"source {number}"
        key = cache.key_of({"source": source})
        recipe = cache.Recipe(f"forward_soak_{number}", key, source, ".cu", ".cubin", lambda path: b"anew")
        entry, _ = cache.fetch(recipe, lock_timeout=5)
        assert entry.directory.is_relative_to(fresh_cache)
