"""Failures that a user can cause or must act on. Each message says what, which, why and the remedy."""

from __future__ import annotations


class EmbforgeError(Exception):
    """Base of every expected failure of this package."""


class SpecError(EmbforgeError, ValueError):
    """A spec that cannot be built: names the table or feature, the field, the value and what is allowed."""

    def __init__(self, message: str, *, entry: tuple[str, int] | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.entry = entry
        """Which entry of a spec file it is about, if that is known: `("table", 3)` is the fourth `[[table]]`."""
        self.field = field
        """Which field of it."""


class PlanError(EmbforgeError, ValueError):
    """A plan field outside its allowed values, or a plan text that cannot be read back."""


class CompileError(EmbforgeError, RuntimeError):
    """A compiler refused generated source. The message holds its log beside numbered source lines."""


class ToolchainError(EmbforgeError, RuntimeError):
    """A compiler or library that a target needs is not on this machine. The message holds the remedy."""


class KernelBugError(EmbforgeError, RuntimeError):
    """The SIMT executor caught a kernel doing what no GPU promises to get right. Names kernel, block, thread, line."""


class LaunchError(EmbforgeError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel. Names the kernel, the device, the reason and the remedy."""


class MissingKernelError(EmbforgeError, RuntimeError):
    """No binary for a plan was found and building one is forbidden (EMBFORGE_JIT=0)."""


class CacheError(EmbforgeError, RuntimeError):
    """The kernel cache has no safe place to live. The message holds the remedy."""


class RuleError(EmbforgeError, ValueError):
    """An update rule that cannot be used: names the rule, the line, what is wrong there and what is allowed."""


class WorkloadError(EmbforgeError, ValueError):
    """A workload or a recorded trace that cannot be used: names the part or the file, what is allowed, what to do."""


class TunedError(EmbforgeError, ValueError):
    """A tuned result that cannot be read, found or stored: names the file, what is wrong and the remedy."""


class RankError(EmbforgeError, RuntimeError):
    """Another rank of a sharded module failed, died or disagrees. Names the rank, if it is known, and the remedy."""
