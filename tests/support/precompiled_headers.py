"""The headers that CPU kernels include, compiled once for all kernels of a test run.

Parsing them takes g++ as long as half of a small kernel. g++ finds a precompiled `immintrin.h` by itself on the path
that `CPATH` names, if it was made by the same flags; this one holds the standard headers, too, that kernels include
after it. The binaries are the same to the byte, and no key of the cache changes. Lookups and backwards for `generic`
do not include it and are compiled as for users, so they show whether a template lacks a standard header.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from embforge.codegen.cache import key_of
from embforge.codegen.machine import find_compiler, runs_here
from embforge.codegen.targets.cpu.isa import FLAGS, ISAS

STANDARD = ("algorithm", "atomic", "cmath", "cstdint", "cstdlib", "cstring", "new", "type_traits")


def precompile(root: Path) -> Path | None:
    """The directory that `CPATH` has to name, made if it does not exist; None without a g++."""
    compiler = find_compiler()
    sets = [isa for isa in ISAS.values() if isa.header == "immintrin.h" and runs_here(isa.name)]
    if "g++" not in compiler.version or not sets:
        return None
    flags = [flag for flag in FLAGS if flag != "-shared"]
    text = "".join(f"#include <{name}>\n" for name in ("immintrin.h", *STANDARD))
    directory = root / key_of({"compiler": compiler.version, "flags": " ".join(flags), "text": text})[:12]
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"):  # of several workers, one compiles
        if directory.exists():
            return directory
        made = Path(tempfile.mkdtemp(dir=root))
        (made / "immintrin.h.gch").mkdir()
        (made / "all.h").write_text(text, encoding="utf-8")
        words = [*compiler.command, *flags, "-x", "c++-header", str(made / "all.h")]
        compilers = [
            subprocess.Popen([*words, *isa.flags, "-o", str(made / "immintrin.h.gch" / isa.name)]) for isa in sets
        ]
        assert {process.wait() for process in compilers} == {0}
        os.chmod(made, 0o755)
        made.rename(directory)
    return directory
