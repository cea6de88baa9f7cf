"""The tunable fields of a plan, per target: meaning, allowed values and sound defaults in one place.

None of them changes a bit of any result. The tuner's space, the manifest and the errors read the
same `choices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from embforge.codegen.errors import PlanError
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.target import target_named


def tunable(default: Any, choices: tuple[Any, ...], doc: str, covered: tuple[Any, ...] | None = None) -> Any:
    """A dataclass field with its allowed values and its meaning.

    `covered`: the values that are enough to verify, because the others give the same code with another number; by
    default all values.
    """
    return field(default=default, metadata={"choices": choices, "doc": doc, "covered": covered or choices})


@dataclass(frozen=True)
class _Checked:
    """Refuses a value outside the field's choices, naming the field, the value and the choices.

    The type counts, too: 4096.0 and True are not the whole numbers that they equal, and generated code would differ.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if not any(_same(value, choice) for choice in choices):
                raise PlanError(
                    f"plan field {item.name}={value!r} is not allowed; allowed: {', '.join(map(str, choices))}"
                )


def _same(value: Any, choice: Any) -> bool:
    if isinstance(choice, tuple):
        return type(value) is tuple and len(value) == len(choice) and all(map(_same, value, choice))
    return type(value) is type(choice) and bool(value == choice)


def _threads() -> Any:
    return tunable(
        0,
        (0, 1, 2, 4, 8, 16, 32, 64),
        "most threads that a call uses; 0: as many as torch has",
        covered=(0, 1, 2),
    )


def _grain_bytes() -> Any:
    return tunable(
        65536,
        (16384, 65536, 262144, 1048576),
        "least work of a task, in bytes that its bags or ids move: no thread is woken for less",
    )


@dataclass(frozen=True)
class CpuParams(_Checked):
    """How the CPU forward kernel walks its rows."""

    prefetch_bytes: int = tunable(
        16384, (0, 1024, 4096, 8192, 16384, 32768), "bytes of rows requested ahead of the row being added"
    )
    prefetch_level: int = tunable(2, (1, 2), "the level of the cache into which rows are requested")
    tile_vectors: int = tunable(8, (2, 4, 8, 16), "most vector registers that hold a row's running sum")
    rows_unrolled: int = tunable(
        1,
        (1, 2, 4),
        "rows of a bag that are loaded before the first of them is added; fewer if registers cannot hold them",
    )
    stores: str = tunable(
        "cached",
        ("cached", "streaming"),
        "how results are written; streaming: past the caches, if the address is aligned and the processor can",
    )
    grain_bytes: int = _grain_bytes()
    threads: int = _threads()


@dataclass(frozen=True)
class CudaParams(_Checked):
    """How the CUDA forward kernel maps bags to lanes and keeps loads in flight."""

    block: int = tunable(256, (128, 256, 512), "threads per block")
    pipeline: tuple[int, int] = tunable(
        (4, 4),
        ((2, 4), (2, 5), (4, 3), (4, 4), (4, 5), (8, 2), (8, 3)),
        "(16-byte row loads in flight per lane, blocks of 256 threads that a multiprocessor must hold): one choice, "
        "because without the second number the compiler does not keep the first",
    )
    vector_bytes: int = tunable(32, (8, 16, 32), "bytes of the widest row load; before sm_100, 32 means 16")
    id_tile: int = tunable(1024, (512, 1024, 2048), "ids that a block stages in shared memory at a time")
    bags_per_block: int = tunable(512, (64, 128, 256, 512, 1024), "most bags that a block owns")
    interleave: int = tunable(
        8,
        (2, 4, 8, 16),
        "bags that a group of lanes adds up in turn; more of them balance a warp and keep rows of short bags in flight",
    )
    cache_hint: str = tunable(
        "no_allocate", ("no_allocate", "evict_last", "default"), "the hint to the L1 cache that a row load has"
    )
    long_bag: int = tunable(1024, (256, 1024, 4096), "number of ids above which a bag is split over blocks")


@dataclass(frozen=True)
class CpuBackwardParams(_Checked):
    """How the CPU backward sorts, reduces and updates."""

    radix_bits: int = tunable(11, (8, 11), "most bits of a row number that one pass of the sort looks at")
    prefetch_bytes: int = tunable(
        8192, (0, 1024, 4096, 8192, 16384, 32768), "bytes of rows and gradients requested ahead of their use"
    )
    prefetch_level: int = tunable(2, (1, 2), "the level of the cache into which rows and gradients are requested")
    tile_vectors: int = tunable(8, (2, 4, 8, 16), "most vector registers that hold a row's running gradient")
    grain_bytes: int = _grain_bytes()
    threads: int = _threads()


@dataclass(frozen=True)
class CudaBackwardParams(_Checked):
    """How the CUDA backward maps runs of equal rows to lanes and keeps loads in flight."""

    block: int = tunable(256, (128, 256, 512), "threads per block")
    pipeline: tuple[int, int] = tunable(
        (4, 4),
        ((2, 4), (2, 5), (4, 3), (4, 4), (8, 2)),
        "(16-byte gradient loads in flight per lane, blocks of 256 threads that a multiprocessor must hold)",
    )
    vector_bytes: int = tunable(16, (8, 16), "bytes of the widest access to a row or a gradient")
    medium_run: int = tunable(
        32, (16, 32, 64), "number of occurrences above which a row is updated after all others, for balance in a warp"
    )


@dataclass(frozen=True)
class ReferenceParams(_Checked):
    """The reference has nothing to tune."""


@dataclass(frozen=True)
class ResolveParams(_Checked):
    """The step that turns ids into rows has nothing to tune, on any target."""


Params = CpuParams | CudaParams | CpuBackwardParams | CudaBackwardParams | ReferenceParams | ResolveParams
ForwardType = type[CpuParams] | type[CudaParams] | type[ReferenceParams]
BackwardType = type[CpuBackwardParams] | type[CudaBackwardParams] | type[ReferenceParams]


@dataclass(frozen=True)
class ParamsTypes:
    """The classes of a target's params."""

    forward: ForwardType
    backward: BackwardType
    """The class that all kernels of a backward have."""


PARAMS: dict[str, ParamsTypes] = {
    "cpu": ParamsTypes(CpuParams, CpuBackwardParams),
    "cuda": ParamsTypes(CudaParams, CudaBackwardParams),
    "simt": ParamsTypes(CudaParams, CudaBackwardParams),
    "reference": ParamsTypes(ReferenceParams, ReferenceParams),
}
"""The classes of params of each target."""


def params_type(target: str, op: str = "forward") -> ForwardType | BackwardType | type[ResolveParams]:
    """The class of a plan's params. `PlanError` for a target that is not known."""
    types = PARAMS[target_named(target).name]
    if op == "resolve":
        return ResolveParams
    return types.forward if op.startswith("forward") else types.backward


def params_from(target: str, values: dict[str, Any], op: str = "forward") -> Params:
    """Params of a target from plain data; `PlanError` names an unknown field."""
    cls = params_type(target, op)
    known = {f.name for f in fields(cls)}
    for key in values:
        if key not in known:
            allowed = ", ".join(sorted(known))
            hint = did_you_mean(key, known)
            raise PlanError(f"plan field {key!r} does not exist for target {target}{hint}; allowed: {allowed}")
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return cls(**plain)
