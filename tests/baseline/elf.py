"""Sections of a 64-bit ELF file: enough to take instructions and constants out of shared libraries and cubins."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_RELOCATION = struct.Struct("<QQq")
_SYMBOL = struct.Struct("<I4xQ8x")
NOBITS = 8
PLT_ENTRY_BYTES = 16


@dataclass(frozen=True)
class Section:
    """One section; `data` is empty where the file holds no bytes for it."""

    name: str
    kind: int
    address: int
    size: int
    info: int
    data: bytes


def sections_of(binary: bytes) -> list[Section]:
    """All sections, in the order of the file."""
    header = _HEADER.unpack_from(binary)
    if header[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    raw = [_SECTION.unpack_from(binary, table + index * entry_size) for index in range(count)]
    names = raw[names_index][4]
    return [
        Section(
            name=binary[names + name : binary.index(b"\0", names + name)].decode(),
            kind=kind,
            address=address,
            size=size,
            info=info,
            data=b"" if kind == NOBITS else binary[offset : offset + size],
        )
        for name, kind, _flags, address, offset, size, _link, info, _alignment, _entry in raw
    ]


def relocations_in(section: Section) -> list[tuple[int, int, int]]:
    """Offset, type and addend of every entry of a `.rela` section."""
    entries = [_RELOCATION.unpack_from(section.data, at) for at in range(0, len(section.data), _RELOCATION.size)]
    return [(offset, info & 0xFFFFFFFF, addend) for offset, info, addend in entries]


def functions_called_by_table(sections: list[Section]) -> dict[int, str]:
    """By the address of an entry in `.plt` (x86-64's layout): the name of another library's function, or where in
    `.text` a function of this library begins."""
    by_name = {section.name: section for section in sections}
    if not {".plt", ".rela.plt", ".dynsym", ".dynstr"} <= by_name.keys():
        return {}
    symbols, names = by_name[".dynsym"].data, by_name[".dynstr"].data
    found = {}
    for number, (_offset, info, _addend) in enumerate(_RELOCATION.iter_unpack(by_name[".rela.plt"].data)):
        name, address = _SYMBOL.unpack_from(symbols, (info >> 32) * _SYMBOL.size)
        text = names[name : names.index(b"\0", name)].decode()
        own = f"own function at {address - by_name['.text'].address}"
        found[by_name[".plt"].address + (number + 1) * PLT_ENTRY_BYTES] = own if address else text
    return found
