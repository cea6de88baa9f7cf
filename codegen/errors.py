"""Failures that a user can cause or must act on. Each message says what failed, where, why, and what to do."""

from __future__ import annotations


class EmbforgeError(Exception):
    """The base of all expected failures of this package."""


class SpecError(EmbforgeError, ValueError):
    """A spec is not valid. The message names the table or feature, the field, the value and what is allowed."""

    def __init__(self, message: str, *, entry: tuple[str, int] | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.entry = entry
        """The entry of a spec file that is wrong, if it is known: `("table", 3)` is the fourth `[[table]]`."""
        self.field = field
        """The field of the entry that is wrong."""


class PlanError(EmbforgeError, ValueError):
    """A plan field has a value that is not allowed, or a plan's text cannot be read."""


class CompileError(EmbforgeError, RuntimeError):
    """A compiler refused generated source. The message holds its log together with numbered source lines."""


class ToolchainError(EmbforgeError, RuntimeError):
    """A compiler or library that a target needs is not on this machine. The message holds the remedy."""


class KernelBugError(EmbforgeError, RuntimeError):
    """The SIMT executor caught a kernel in undefined behaviour. The message names kernel, block, thread and line."""


class LaunchError(EmbforgeError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel. The message names kernel, device, reason and remedy."""


class MissingKernelError(EmbforgeError, RuntimeError):
    """No binary for a plan was found and building one is forbidden (EMBFORGE_JIT=0)."""


class CacheError(EmbforgeError, RuntimeError):
    """There is no safe directory for the kernel cache. The message holds the remedy."""


class RuleError(EmbforgeError, ValueError):
    """An update rule is not valid. The message names the rule, the line, what is wrong and what is allowed."""


class WorkloadError(EmbforgeError, ValueError):
    """A workload or a trace cannot be used. The message names the part or the file, what is allowed and the remedy."""


class TunedError(EmbforgeError, ValueError):
    """A tuned result cannot be read, found or stored. The message names the file, what is wrong and the remedy."""


class RankError(EmbforgeError, RuntimeError):
    """Another rank of a sharded module failed, died or disagrees. The message names the rank, if it is known, and the
    remedy."""
