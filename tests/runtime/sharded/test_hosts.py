"""torchrun starts sharded modules on many processes and on two hosts: network namespaces with their own addresses.

What the ranks do and compare is in `tests/support/sharded/script.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "sharded" / "script.py"
NO_RIGHTS = "no rights to make network namespaces, or no ip command"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = "29517"
PATIENCE = 600


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_torchrun_on_one_host(processes: int) -> None:
    run = _torchrun("--standalone", "--nproc-per-node", str(processes))
    output = _finished(run)
    expected = {f"ok {rank} {processes} {processes}" for rank in range(processes)}
    assert {" ".join(line.split()[:4]) for line in output.splitlines() if line.startswith("ok ")} == expected, output


def test_torchrun_on_two_hosts() -> None:
    with _two_hosts() as hosts:
        runs = [
            _torchrun(
                "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2",
                "--master-addr", ADDRESSES[0], "--master-port", PORT,
                before=["ip", "netns", "exec", host], interface=f"ef{number}-{os.getpid()}",
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip
        outputs = [_finished(run) for run in runs]
    for number, output in enumerate(outputs):
        said = sorted(line for line in output.splitlines() if line.startswith("ok "))
        assert said == [f"ok {rank} 4 2 {ADDRESSES[number]}" for rank in (2 * number, 2 * number + 1)], output


def _torchrun(*options: str, before: list[str] | None = None, interface: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    command = [*(before or []), sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def _finished(run: subprocess.Popen[str]) -> str:
    try:
        output, _ = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun ends its ranks
        output, _ = run.communicate()
        pytest.fail(f"no end within {PATIENCE} s:\n{output}")
    assert run.returncode == 0, output
    return output


@contextmanager
def _two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with a virtual cable between them. Skips if the machine does not allow that."""
    if shutil.which("ip") is None:
        pytest.skip(NO_RIGHTS)
    names = [f"ef-host{number}-{os.getpid()}" for number in (0, 1)]
    ends = [f"ef{number}-{os.getpid()}" for number in (0, 1)]
    with ExitStack() as stack:
        for name in names:
            if not _ip("netns", "add", name):
                pytest.skip(NO_RIGHTS)
            stack.callback(_ip, "netns", "del", name)  # this also removes the cable
        cable = ("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        if not _ip(*cable):
            pytest.skip(NO_RIGHTS)
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            for command in (
                ("addr", "add", f"{address}/24", "dev", end), ("link", "set", end, "up"), ("link", "set", "lo", "up"),
            ):  # fmt: skip
                assert _ip("-n", name, *command)
        yield names


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
