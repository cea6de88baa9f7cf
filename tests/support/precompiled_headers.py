"""The header of vector instructions, compiled once for all kernels of a test run.

Parsing `immintrin.h` takes g++ as long as a third of a kernel. g++ finds a precompiled one by itself on the path that
`CPATH` names, if it was made by the same flags; the binaries are the same to the byte, and no key of the cache changes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from embforge.codegen.cache import key_of
from embforge.codegen.machine import find_compiler, runs_here
from embforge.codegen.targets.cpu.isa import FLAGS, ISAS


def precompile(root: Path) -> Path | None:
    """The directory that `CPATH` has to name, made if it does not exist; None without a g++."""
    compiler = find_compiler()
    sets = [isa for isa in ISAS.values() if isa.header == "immintrin.h" and runs_here(isa.name)]
    if "g++" not in compiler.version or not sets:
        return None
    flags = [flag for flag in FLAGS if flag != "-shared"]
    directory = root / key_of({"compiler": compiler.version, "flags": " ".join(flags)})[:12]
    if directory.exists():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root))
    (made / "immintrin.h.gch").mkdir()
    (made / "all.h").write_text("#include <immintrin.h>\n", encoding="utf-8")
    for isa in sets:
        words = [*compiler.command, *flags, *isa.flags, "-x", "c++-header", str(made / "all.h")]
        subprocess.run([*words, "-o", str(made / "immintrin.h.gch" / isa.name)], check=True)
    try:
        made.rename(directory)
    except OSError:  # another worker was first
        if not directory.exists():
            raise
    os.chmod(directory, 0o755)
    return directory
