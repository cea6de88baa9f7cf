"""Digests of machine code: what a processor executes and reads counts, names and comments do not.

Symbol names, line information and addresses of whole sections are left out, so renaming a kernel, a table or a C++
function and rewriting comments keep a digest; any other instruction or constant changes it. So does another register
count of a cubin for sm_75; newer ones keep the count in `.nv.info`, which is not read yet.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from baseline.digests import short
from baseline.elf import NOBITS, Section, functions_called_by_table, relocations_in, sections_of

RELATIVE = {62: 8, 183: 1027}
"""By processor (x86-64, aarch64): the type of relocations that hold an address in the same library."""
CUDA_MACHINE = 190
CONSTANTS = (".rodata", ".data.rel.ro", ".init_array", ".tdata")
WORD_BYTES = 8
CALLS = (0xE8, 0xE9)
"""x86-64's call and jump with a distance of four bytes."""
_MACHINE = struct.Struct("<H")
_DISTANCE = struct.Struct("<i")


def code_digest(binary: bytes) -> str:
    """A readable digest of a cubin's or shared library's code: how much there is, and a hash."""
    (machine,) = _MACHINE.unpack_from(binary, 18)
    sections = sections_of(binary)
    return _cubin_digest(sections) if machine == CUDA_MACHINE else _library_digest(sections, RELATIVE.get(machine, 0))


def _cubin_digest(sections: Sequence[Section]) -> str:
    """A digest that does not depend on the order of kernels, which follows the names of symbols."""
    kernels = {s.name.removeprefix(".text."): s for s in sections if s.name.startswith(".text.")}
    other_sections = {name: hashlib.sha256() for name in kernels}
    shared: list[bytes] = []
    for section in sections:
        owner = next((name for name in kernels if section.name.endswith(f".{name}")), None)
        if owner is None:
            if section.name.startswith((".nv.constant", ".nv.global")) and section.name != ".nv.constant4":
                shared.append(f"{section.name} {section.size} ".encode() + section.data)
        elif section.name.startswith(".nv.shared."):
            other_sections[owner].update(f"shared {section.size} ".encode())
        elif section.name.startswith(".nv.constant"):
            other_sections[owner].update(f"{section.name.removesuffix(owner)} {section.size} ".encode() + section.data)
    codes = []
    for name, section in kernels.items():
        registers = section.info >> 24
        codes.append(_hash([f"registers {registers} ".encode(), other_sections[name].digest(), section.data]))
    size = sum(section.size for section in kernels.values())
    return f"{short(_hash([*sorted(codes), *shared]))} ({len(kernels)} kernels, {size} bytes)"


def _library_digest(sections: Sequence[Section], relative: int) -> str:
    """A digest of code, constants and initialised data. Addresses from the linker count relative to their section."""
    relocations = [entry for s in sections if s.name == ".rela.dyn" for entry in relocations_in(s)]
    filled = {offset for offset, kind, _ in relocations if kind == relative}
    parts = [_named(s, _without(s, filled)) for s in sections if s.name in CONSTANTS]
    parts += [_named(s, b"") for s in sections if s.kind == NOBITS]
    code = next(section for section in sections if section.name == ".text")
    parts.append(_named(code, _with_names_of_calls(code, functions_called_by_table(sections))))
    parts += [
        f"{_place(sections, offset)} -> {_place(sections, addend)}".encode()
        for offset, kind, addend in relocations
        if kind == relative
    ]
    return f"{short(_hash(parts))} ({code.size} bytes)"


def _named(section: Section, data: bytes) -> bytes:
    return f"{section.name} {section.size} ".encode() + data


def _without(section: Section, addresses: set[int]) -> bytes:
    """A section's data without the words at these addresses: a linker may keep there what it will fill in."""
    kept = bytearray(section.data)
    for address in addresses:
        if section.address <= address < section.address + section.size:
            kept[address - section.address : address - section.address + WORD_BYTES] = bytes(WORD_BYTES)
    return bytes(kept)


def _with_names_of_calls(code: Section, functions: dict[int, str]) -> bytes:
    """x86-64 code in which a hash of the called function replaces the distance of each call or jump into the linker's
    table, because the order of functions in that table follows their names."""
    changed = bytearray(code.data)
    for at in range(1, len(changed) - 3):
        if code.data[at - 1] in CALLS:
            (distance,) = _DISTANCE.unpack_from(code.data, at)
            name = functions.get(code.address + at + 4 + distance)
            if name is not None:
                changed[at : at + 4] = hashlib.sha256(name.encode()).digest()[:4]
    return bytes(changed)


def _place(sections: Sequence[Section], address: int) -> str:
    """An address by its section and the distance from its start."""
    for section in sections:
        if section.address and section.address <= address < section.address + max(1, section.size):
            return f"{section.name}+{address - section.address}"
    return "elsewhere"


def _hash(parts: Iterable[bytes]) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()
