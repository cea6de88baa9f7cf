"""The errors of CUDA calls: mistakes in the input, which kernels report in status words, and launches that the driver
refuses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from embforge.codegen.errors import LaunchError
from embforge.codegen.kernel import MISTAKES, STATUS_WORDS, KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.remap import bad_id
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cuda.arch import nearest_arch
from embforge.codegen.targets.cuda.launch import KernelLaunch


def mistake(plan: Plan, words: list[int], bounds_check: str) -> Exception | None:
    """The error for the first mistake that a plan's status words report, None if there is none. Bad ids are mistakes
    only if `bounds_check` is "error"."""
    records = dict(zip(MISTAKES, _records(words), strict=True))
    for kind, error_of in ERRORS.items():
        if records[kind]["claimed"] and (kind != "BAD_ID" or bounds_check == "error"):
            return error_of(plan.spec, records[kind], plan.id_dtype)
    return None


def driver_error(message: str, plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> LaunchError:
    """The error for a launch that the driver refused: which kernel, on which device, why, and what to do.

    `message` is the driver's, and begins with its name for the error, `CUDA_ERROR_...:`.
    """
    why = REASONS.get(message.split(":")[0], _unexpected)
    return LaunchError(f"{kernel.symbol} on {device}: {why(plan, kernel, device)} ({message})")


def _wrong_arch(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"the kernel was made for {plan.arch}, but the device has compute capability {major}.{minor}; make it for "
        f"{nearest_arch(major, minor)}: leave `kernels` and EMBFORGE_KERNELS unset, or call `embforge gen` with "
        f"--arch {nearest_arch(major, minor)}"
    )


def _unreadable(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    return (
        "the kernel's file is damaged or of another version; make it again: run `embforge cache clear`, or "
        "`embforge gen` if `kernels` or EMBFORGE_KERNELS names a directory"
    )


def _no_memory(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    return (
        "the device has no memory left for the kernel's code; free some: torch.cuda.empty_cache() returns what torch "
        "keeps but does not use"
    )


def _refused(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    return (
        f"the device does not accept {kernel.grid} blocks of {kernel.block} threads with {kernel.shared} bytes of "
        "dynamic shared memory; use a plan with a smaller block, or split the batch"
    )


def _earlier(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    return (
        "a kernel on this device failed earlier, possibly a different one, and the device cannot be used again until "
        "the process ends; CUDA_LAUNCH_BLOCKING=1 finds out which kernel, and backend='simt' checks each memory access "
        "of embforge's kernels"
    )


def _unexpected(plan: KernelPlan, kernel: KernelLaunch, device: torch.device) -> str:
    return (
        "the driver refused to load or launch the kernel; `embforge env` shows the driver's version and packages that "
        "may not fit it, and `embforge verify SPEC --on cuda` shows whether other kernels run"
    )


REASONS: dict[str, Callable[[KernelPlan, KernelLaunch, torch.device], str]] = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _wrong_arch,
    "CUDA_ERROR_INVALID_IMAGE": _unreadable,
    "CUDA_ERROR_NOT_FOUND": _unreadable,
    "CUDA_ERROR_OUT_OF_MEMORY": _no_memory,
    "CUDA_ERROR_INVALID_VALUE": _refused,
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": _refused,
    # According to cuda.h, a process cannot use the device any more after one of these.
    "CUDA_ERROR_ECC_UNCORRECTABLE": _earlier,
    "CUDA_ERROR_CONTAINED": _earlier,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _earlier,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _earlier,
    "CUDA_ERROR_ASSERT": _earlier,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _earlier,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _earlier,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _earlier,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _earlier,
    "CUDA_ERROR_INVALID_PC": _earlier,
    "CUDA_ERROR_LAUNCH_FAILED": _earlier,
}
"""For each of the driver's names of errors, a function that explains the error."""


def _records(words: list[int]) -> list[dict[str, int]]:
    length = len(STATUS_WORDS)
    return [dict(zip(STATUS_WORDS, words[i : i + length], strict=True)) for i in range(0, len(words), length)]


def _bad_id(spec: CollectionSpec, record: dict[str, int], id_dtype: str) -> Exception:
    return bad_id(spec, record["feature"], record["value"], record["sample"], record["position"], id_dtype)


def _bad_offset(spec: CollectionSpec, record: dict[str, int], id_dtype: str) -> Exception:
    feature = spec.features[record["feature"]]
    return ValueError(
        f"offsets: offsets[{record['position']}] is {record['value']} (the end of sample {record['sample']} of feature "
        f"{feature.name!r}), which does not fit its neighbours; offsets must start at 0, never fall and end at the "
        "number of ids"
    )


def _long_concat(spec: CollectionSpec, record: dict[str, int], id_dtype: str) -> Exception:
    feature = spec.features[record["feature"]]
    return ValueError(
        f"feature {feature.name!r}: the bag of sample {record['sample']} has {record['value']} ids, "
        f"hotness={feature.hotness} allows {feature.hotness}; raise hotness or cut the bag"
    )


ERRORS: dict[str, Callable[[CollectionSpec, dict[str, int], str], Exception]] = {
    "BAD_OFFSET": _bad_offset,
    "LONG_CONCAT": _long_concat,
    "BAD_ID": _bad_id,
}
"""For each kind of mistake, a function that makes its error. If there are several mistakes, the kind that comes first
here is raised."""
