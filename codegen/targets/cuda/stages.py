"""What `cuda/stages/stages.cu.j2` says of a plan of the stages between ranks: kernels of each stage, and their arguments."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from embforge.codegen import stages
from embforge.codegen.semantics import CHUNK
from embforge.codegen.signature import Argument
from embforge.codegen.stages import STAGES, stage_arguments
from embforge.codegen.targets.cuda.arch import Arch, arch_named
from embforge.codegen.targets.cpu.stages import stage_types, word_enums

THREADS = 128
"""Of a block of any stage."""
COUNTERS = 1024
"""Of a warp that deals out ids of pooled features: so many (shard, sample)s at once."""
SAMPLES = 32
"""Of a block that pools, or spreads gradients."""
ROW_BITS = 42
"""Of a key: of a sequence's id or, but for the first, of a bag's only id; the stream has the others but the sign's."""
MOST_STREAMS = 2 ** (63 - ROW_BITS) - 2
BF16_ARCH = 80
"""The first architecture that converts to bf16 by an instruction."""

_PARTS = Argument("parts", "int64_t", "blocks that share a bucketing, segment or pick")
_RUN = Argument("run", "int64_t", "samples that a warp takes")
WORKSPACE: dict[str, tuple[Argument, ...]] = {
    "count": (
        Argument("keys", "int64_t*", "[layers, num_values] stream and row of a sequence's ids, then of pools that are "
                 "asked for [pooled streams, batch]; zeros before"),
        Argument("sorted_keys", "const int64_t*", "those in order"),
        Argument("order", "const int64_t*", "where each of them stood"),
        Argument("heads", "int32_t*", "1 where a row begins that is sent, or a pool that is asked for, by sorted key"),
        Argument("ranks", "const int32_t*", "those summed up"),
        Argument("firsts", "int32_t*", "heads of all streams before a stream"),
        Argument("num_keys", "int64_t", "keys"),
        Argument("num_slots", "int64_t", "layers * num_values: where keys of pools begin"),
        _RUN,
        _PARTS,
    ),
    "fill": (Argument("ends", "const int32_t*", "lengths, summed up along the samples"), _RUN, _PARTS),
    "regroup": (_PARTS,),
    "gather": (_PARTS,),
}  # fmt: skip
"""What kernels take behind the arguments of their stage."""

KERNELS: dict[str, dict[str, str]] = {
    "count": {
        "borders": "check_borders",
        "pooled": "count_pooled",
        "divisors": "sum_divisors",
        "totals": "sum_lengths",
        "keys": "make_keys",
        "pools": "make_pool_keys",
        "heads": "mark_heads",
        "firsts": "find_firsts",
        "slots": "give_slots",
    },
    "fill": {"lengths": "fill_lengths", "asked": "fill_asked", "pooled": "fill_pooled", "sequence": "fill_sequence"},
    "regroup": {"values": "regroup_values", "borders": "regroup_borders"},
    "gather": {"rows": "gather_rows"},
    "network_forward": {"pool": "pool_network"},
    "network_backward": {"spread": "spread_network"},
    "pack": {"rows": "pack_rows"},
    "unpack": {"rows": "unpack_rows"},
}
"""By stage its kernels, in the order of their launches, and the function that each of them is."""


def kernel_arguments(stage: str) -> tuple[Argument, ...]:
    """The arguments of every kernel of a stage, in call order."""
    return (*stage_arguments("cuda", stage), *WORKSPACE.get(stage, ()))


def symbol_of(plan: Any, stage: str, kernel: str) -> str:
    """A kernel's name in the binary."""
    return f"{plan.symbol}_{stage}_{kernel}"


def stage_facts(plan: Any) -> dict[str, Any]:
    """Everything `cuda/stages/stages.cu.j2` names."""
    arch = arch_named(plan.arch)
    formats = {plan.wire_dtype, plan.gradient_dtype, plan.output_dtype}
    narrow = {dtype: _rounding(dtype, arch) for dtype in sorted(formats - {"fp32"})}
    conversions = set(narrow.values()) & {"float_to_half", "float_to_bf16"}
    return {
        "uri": plan.uri,
        "arch": plan.arch,
        "version": version("embforge"),
        # Of the primitives and numbers that all kernels share.
        "load_hint": "",
        "load_bytes": [16, 8, 4, 2],
        "table_dtypes": formats | {"fp32"},
        "output_dtype": "fp32",
        "narrow": None,
        "conversions": conversions | ({"half_to_float"} if "fp16" in formats else set()),
        "narrow_formats": narrow,
        "roundings": set(narrow.values()),
        "threads": THREADS,
        "chunk": CHUNK,
        "counters": COUNTERS,
        "samples": SAMPLES,
        "row_bits": ROW_BITS,
        "absent": stages.ABSENT,
        "actions": stages.ACTIONS,
        "packings": stages.PACKINGS,
        "words": word_enums(),
        "mistakes": stages.MISTAKES,
        "structs": {stage: "".join(word.title() for word in stage.split("_")) for stage in STAGES},
        "arguments": {stage: kernel_arguments(stage) for stage in STAGES},
        "kernels": [
            {"stage": stage, "symbol": symbol_of(plan, stage, name), "function": function}
            for stage, kernels in KERNELS.items()
            for name, function in kernels.items()
        ],
        **stage_types(plan),
    }


def _rounding(dtype: str, arch: Arch) -> str:
    """The function that rounds fp32 to a narrower format."""
    if dtype == "fp16":
        return "float_to_half"
    return "float_to_bf16" if arch.number >= BF16_ARCH else "round_to_bf16"
