"""The machines that a plan is made for: ranks, nodes, links and their speeds, as a short TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from embforge.codegen.cache import write_atomically
from embforge.codegen.errors import PlanError
from embforge.codegen.reading.documents import DocumentError, read_toml, shown
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.tuned.stores import user_dir

GB = 1e9
MICROSECOND = 1e-6
LOCAL = "local"
"""The name of the topology that `embforge plan --calibrate` measured."""


@dataclass(frozen=True)
class Link:
    """A rank's connection to others. Its two directions are independent."""

    bandwidth: float
    """Bytes per second, in each direction."""
    latency: float
    """Seconds that a collective takes in addition to the time for its bytes."""
    message: float = 0.0
    """Seconds that each further peer adds to a collective."""

    def time(self, bytes_: Any, peers: int) -> Any:
        """Seconds of one collective in which a rank sends `bytes_` (a number or an array) to `peers` other ranks."""
        return (self.latency + self.message * peers + bytes_ / self.bandwidth) if peers else 0.0


@dataclass(frozen=True)
class Topology:
    """Nodes and ranks, all of them equal. Rank k is local rank `k % ranks_per_node` of node `k // ranks_per_node`."""

    name: str
    nodes: int
    ranks_per_node: int
    memory: float
    """Bytes of memory per rank."""
    lookup_bandwidth: float
    """Bytes per second at which a rank reads scattered rows."""
    update_bandwidth: float
    """Bytes per second at which a rank reads scattered rows and writes them back."""
    node_link: Link
    """A rank's link to ranks of the same node."""
    rail: Link
    """A rank's own link to ranks of other nodes."""
    launch: float = 0.0
    """Seconds that it takes to start a kernel."""
    usable: float = 0.9
    """Share of the memory that tables, states and exchange buffers may take."""
    measured: bool = False
    """Whether the numbers were measured on the machine itself. Otherwise they are assumptions."""
    source: str = ""
    """Where the numbers come from."""
    hardware: tuple[tuple[str, str], ...] = field(default=())
    """The hardware on which a result of the tuned store must have been measured to be used, e.g. arch = sm_90."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def limit(self) -> float:
        """Bytes per rank that a plan may use."""
        return self.memory * self.usable

    def of_size(self, world_size: int) -> Topology:
        """A topology of `world_size` ranks on nodes like these: as many nodes as needed, or a part of one."""
        if world_size < 1 or (world_size > self.ranks_per_node and world_size % self.ranks_per_node):
            raise PlanError(
                f"topology {self.name!r}: {world_size} ranks on nodes of {self.ranks_per_node}; allowed: 1 to "
                f"{self.ranks_per_node}, and multiples of {self.ranks_per_node}"
            )
        ranks = min(world_size, self.ranks_per_node)
        return replace(self, nodes=world_size // ranks, ranks_per_node=ranks)

    def to_toml(self) -> str:
        """The topology as TOML text, from which `topology_from` makes an equal one."""
        lines = [f'name = "{self.name}"', f"nodes = {self.nodes}", f"ranks_per_node = {self.ranks_per_node}"]
        lines += [f"measured = {str(self.measured).lower()}", f'source = """{self.source}"""', "", "[rank]"]
        lines += [f"memory_gb = {self.memory / GB!r}", f"usable = {self.usable!r}"]
        lines += [f"lookup_gb_s = {self.lookup_bandwidth / GB!r}", f"update_gb_s = {self.update_bandwidth / GB!r}"]
        lines += [f"launch_us = {self.launch / MICROSECOND!r}"]
        for name, link in (("node_link", self.node_link), ("rail", self.rail)):
            lines += ["", f"[{name}]", f"gb_s = {link.bandwidth / GB!r}"]
            lines += [f"latency_us = {link.latency / MICROSECOND!r}", f"message_us = {link.message / MICROSECOND!r}"]
        if self.hardware:
            lines += ["", "[hardware]", *(f'{key} = "{value}"' for key, value in self.hardware)]
        return "\n".join(lines) + "\n"


def load_topology(text: str | Path | None = None) -> Topology:
    """Loads a topology: from a file, the measured one (`local` or None), or the shipped one of that name.

    `PlanError` lists the names that exist.
    """
    if text is None:
        if not calibrated_path().is_file():
            raise PlanError(
                "no topology is named and this machine has not been measured; name one (--topology "
                f"{' | '.join(sorted(_shipped()))} | FILE.toml), or measure it once by `embforge plan --calibrate`"
            )
        return _read(calibrated_path())
    path = Path(text)
    if path.is_file():
        return _read(path)
    if str(text) == LOCAL and calibrated_path().is_file():
        return _read(calibrated_path())
    shipped = _shipped()
    if str(text) not in shipped:
        if path.exists():
            return _read(path)  # raises an error that says what it is instead of a file
        in_folder = (item.name for item in path.parent.glob("*.toml"))
        hint = did_you_mean(str(text), [*shipped, LOCAL]) or did_you_mean(path.name, in_folder)
        raise PlanError(
            f"{text}: no such topology file, and no such example{hint}; examples: {', '.join(sorted(shipped))}; "
            f"{LOCAL!r} is this machine, once `embforge plan --calibrate` has measured it"
        )
    return _read(shipped[str(text)])


def calibrated_path() -> Path:
    """The file of the measured topology, in the folder of this user's tuned results."""
    return user_dir() / "topologies" / f"{LOCAL}.toml"


def save_calibrated(topology: Topology) -> Path:
    """Saves a measured topology in one step: other processes read either the old one or the new one."""
    path = calibrated_path()
    os.makedirs(path.parent, exist_ok=True)
    write_atomically(path, topology.to_toml().encode())
    return path


def topology_from(data: Mapping[str, Any], name: str) -> Topology:
    """A topology from a TOML file's data; `PlanError` names the field that is wrong."""
    reader = _Reader(f"topology {shown(data.get('name', name))}")
    known = {"name", "nodes", "ranks_per_node", "measured", "source", "rank", "node_link", "rail", "hardware"}
    reader.only(data, known, "")
    rank = reader.section(data, "rank", {"memory_gb", "lookup_gb_s", "update_gb_s", "launch_us", "usable"})
    lookup = reader.number(rank, "rank.lookup_gb_s")
    usable = reader.number(rank, "rank.usable", Topology.usable)
    if usable > 1:
        raise PlanError(
            f"{reader.where}: rank.usable={usable!r} is not allowed; allowed: a share above 0 and at most 1"
        )
    hardware = reader.section(data, "hardware", None, needed=False)
    return Topology(
        name=str(data.get("name", name)),
        nodes=reader.whole(data, "nodes"),
        ranks_per_node=reader.whole(data, "ranks_per_node"),
        memory=reader.number(rank, "rank.memory_gb") * GB,
        lookup_bandwidth=lookup * GB,
        update_bandwidth=reader.number(rank, "rank.update_gb_s", lookup) * GB,
        node_link=reader.link(data, "node_link"),
        rail=reader.link(data, "rail"),
        launch=reader.number(rank, "rank.launch_us", 0.0, zero=True) * MICROSECOND,
        usable=usable,
        measured=data.get("measured") is True,
        source=str(data.get("source", "")).strip(),
        hardware=tuple((key, str(value)) for key, value in hardware.items()),
    )


@dataclass(frozen=True)
class _Reader:
    where: str

    def only(self, data: Mapping[str, Any], known: set[str], prefix: str) -> None:
        for key in data:
            if key not in known:
                allowed = ", ".join(prefix + name for name in sorted(known))
                hint = did_you_mean(key, known)
                raise PlanError(f"{self.where}: unknown field {shown(prefix + key)}{hint}; allowed: {allowed}")

    def section(
        self, data: Mapping[str, Any], name: str, known: set[str] | None, needed: bool = True
    ) -> Mapping[str, Any]:
        """A section of the file; `known` are the names that it may have (None: any)."""
        section = data.get(name, None if needed else {})
        if not isinstance(section, Mapping):
            content = ", ".join(sorted(known)) if known else "names and texts"
            raise PlanError(f"{self.where}: [{name}] is missing or not a section; it contains {content}")
        if known is not None:
            self.only(section, known, f"{name}.")
        return section

    def number(self, data: Mapping[str, Any], path: str, default: float | None = None, zero: bool = False) -> float:
        value = data.get(path.rpartition(".")[2], default)
        if value is None:
            raise PlanError(f"{self.where}: field {path!r} is missing; it has no default")
        if type(value) not in (int, float) or not (0 <= value < 1e12) or (value == 0 and not zero):
            raise PlanError(f"{self.where}: {path}={shown(value)} is not allowed; allowed: a number above 0")
        return float(value)

    def whole(self, data: Mapping[str, Any], name: str) -> int:
        value = data.get(name)
        if type(value) is not int or not 1 <= value <= 2**20:
            raise PlanError(f"{self.where}: {name}={shown(value)} is not allowed; allowed: a whole number, at least 1")
        return value

    def link(self, data: Mapping[str, Any], name: str) -> Link:
        section = self.section(data, name, {"gb_s", "latency_us", "message_us"})
        return Link(
            self.number(section, f"{name}.gb_s") * GB,
            self.number(section, f"{name}.latency_us", zero=True) * MICROSECOND,
            self.number(section, f"{name}.message_us", 0.0, zero=True) * MICROSECOND,
        )


def _read(path: Path) -> Topology:
    try:
        return topology_from(read_toml(path), path.stem)
    except (OSError, DocumentError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _shipped() -> dict[str, Path]:
    folder = files("embforge.topologies")
    return {Path(item.name).stem: Path(str(item)) for item in folder.iterdir() if item.name.endswith(".toml")}
