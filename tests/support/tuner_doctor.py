"""Bad candidates for the tuner: real shared libraries in real cache entries, which call another plan's kernel and
misbehave before or after the call."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from embforge.codegen import build as building
from embforge.codegen import cache
from embforge.codegen.build import build, source_of
from embforge.codegen.kernel import arguments_of
from embforge.codegen.machine import find_compiler
from embforge.codegen.plan import Plan
from embforge.codegen.targets import toolchain_of

LIBRARY = """
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>

template <typename Function> Function real(const char* entry) {
    return reinterpret_cast<Function>(dlsym(dlopen("%(real)s", RTLD_NOW), entry));
}

extern "C" int64_t %(uri)s_workspace(int64_t batch, int64_t num_values, int64_t threads) {
    return real<int64_t (*)(int64_t, int64_t, int64_t)>("%(real_uri)s_workspace")(batch, num_values, threads);
}

extern "C" int64_t %(uri)s_count_words(const int64_t* words) {
    return real<int64_t (*)(const int64_t*)>("%(real_uri)s_count_words")(words);
}

extern "C" int64_t %(uri)s_words(const int64_t* words) {
    static int64_t calls = 0;
    ++calls;
%(arguments)s
    %(before)s
    const int64_t status = real<int64_t (*)(const int64_t*)>("%(real_uri)s_words")(words);
    %(after)s
    return status;
}
"""
CRASH = "*static_cast<volatile int*>(nullptr) = 1;"
HANG = "for (volatile bool forever = true; forever;) {}"
WRONG = "if (batch > 0) reinterpret_cast<float*>(pooled)[0] = 12345;"


@dataclass(frozen=True)
class Doctor:
    """Puts kernels into the cache that EMBFORGE_CACHE_DIR names."""

    usual_cache: str
    """The cache of real kernels, which is shared by all runs of the tests."""
    healthy: Plan
    """The plan whose kernel the spoiled ones call."""

    def cure(self, plan: Plan) -> Path:
        """Puts the plan's real kernel into the cache; it is compiled once for all runs of the tests."""
        test_cache = os.environ["EMBFORGE_CACHE_DIR"]
        os.environ["EMBFORGE_CACHE_DIR"] = self.usual_cache
        try:
            binary = build(plan).binary
        finally:
            os.environ["EMBFORGE_CACHE_DIR"] = test_cache
        copy = Path(test_cache) / binary.parent.relative_to(self.usual_cache)
        if not copy.exists():  # otherwise a library that is loaded would be overwritten
            shutil.copytree(binary.parent, copy)
        return copy / binary.name

    def spoil(self, plan: Plan, before: str = "", after: str = "", *, like: Plan | None = None) -> Plan:
        """Puts a library into the cache as the plan's kernel. It calls the kernel of `like`, and runs C++ statements
        before and after the call."""
        like = like or self.healthy
        real = self.cure(like)
        names = [argument.name for argument in arguments_of("cpu", plan.op)]
        text = LIBRARY % {
            "uri": plan.uri,
            "real": real,
            "real_uri": like.uri,
            "arguments": "\n".join(
                f"    [[maybe_unused]] const int64_t {name} = words[{i}];" for i, name in enumerate(names)
            ),
            "before": before,
            "after": after,
        }
        recipe = building._recipe(plan, toolchain_of("cpu"), source_of(plan))
        shutil.rmtree(cache.entry_dir(recipe), ignore_errors=True)  # another test may have put an entry there
        cache.fetch(replace(recipe, compile=lambda source: _compiled(text, source.parent)))
        return plan


def _compiled(text: str, folder: Path) -> bytes:
    source, library = folder / "doctored.cpp", folder / "doctored.so"
    source.write_text(text)
    subprocess.run([*find_compiler().command, "-shared", "-fPIC", "-O0", str(source), "-o", str(library)], check=True)
    return library.read_bytes()
