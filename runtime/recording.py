"""`ef.record(module, path)`: saves the batches that a module serves, for `embforge tune --workload trace:PATH`.

While a recording is on, its module's lookup is shadowed on the instance; when it is off, calls pay nothing.
Calls that a compiler or a tracer makes are not seen: nothing of Python runs in them. Nor are forwards that a backward
pass repeats (torch.utils.checkpoint), which are no new traffic.
"""

from __future__ import annotations

import atexit
import itertools
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from types import MethodType

import torch
from torch import Tensor, nn

from embforge.codegen.errors import WorkloadError
from embforge.codegen.tuned.shape import shape_of
from embforge.collection import EmbeddingCollection
from embforge.inputs import Batch
from embforge.torch_internals import current_pass, dispatch_modes, functorch_level, tracing_state
from embforge.trace.file_format import (
    BATCHES,
    BATCHES_VARIABLE,
    FILE_VARIABLE,
    Seen,
    checked_target,
    numbered,
    trace_of,
    write_trace,
)

MOST_BYTES = 2**30
"""A recording ends when it holds this much, if it has not its batches sooner."""
EAGER = 'torch.compiler.set_stance("force_eager")'

SHADOWED = EmbeddingCollection.lookup.__name__

_made = itertools.count(1)
"""Numbers the collections that record themselves because the environment says so."""


def record(module: nn.Module, path: str | Path, batches: int = BATCHES) -> Recording:
    """Starts to save what every collection in `module` is asked for: its first `batches` batches, from now on.

    Ends by itself, and the file is written, after that many batches; sooner by `stop()`, at the end of a `with` block
    or of the program. One file a collection: `path`, then `name-2.npz` and so on beside it, in the order of
    `module.modules()`. On a GPU every recorded call waits for the device. `WorkloadError` names what is wrong.
    """
    found = [part for part in module.modules() if isinstance(part, EmbeddingCollection)]
    if not found:
        raise WorkloadError(f"record: {type(module).__name__} has no EmbeddingCollection in it; give a module that has")
    path = checked_target(Path(path), batches)
    return Recording(tuple(Recorder(part, numbered(path, i), batches) for i, part in enumerate(found, start=1)))


class Recording:
    """Recordings of one model's collections. Stops them at the end of a `with` block, or by `stop()`."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each collection; one that is never called gets none."""
        return tuple(recorder.path for recorder in self._recorders)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches saved so far, of each collection."""
        return tuple(recorder.count for recorder in self._recorders)

    @property
    def active(self) -> bool:
        """Whether any collection still records."""
        return any(recorder.active for recorder in self._recorders)

    def stop(self) -> None:
        """Writes what was seen and ends. Does nothing if it has ended before. `OSError` if a file cannot be written."""
        for recorder in self._recorders:
            recorder.stop()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class Recorder:
    """Records one collection into one file. Active from the moment it is made."""

    def __init__(self, module: EmbeddingCollection, path: Path, batches: int) -> None:
        self.path = path
        self.count = 0
        self.active = True
        self._spec = module.spec
        self._batches = batches
        self._bytes = 0
        self._seen: list[Seen] = []
        self._lock = Lock()  # several threads may call a module
        self._process = os.getpid()
        self._module = weakref.ref(module)  # a recording keeps nobody's tables alive
        _tap_of(module).recorders.append(self)
        atexit.register(self.stop)

    def see(self, batch: Batch) -> None:
        """Takes a copy of a call's input, and ends the recording if it was the last one wanted."""
        seen = _copied(batch)
        with self._lock:
            if not self.active or self.count >= self._batches or not _is_sound(seen):
                return
            self._seen.append(seen)
            self.count += 1
            self._bytes += seen.nbytes
            full = self.count >= self._batches or self._bytes >= MOST_BYTES
        if full:
            try:
                self.stop()
            except OSError as error:  # the call that was recorded has succeeded, and goes on
                warnings.warn(f"the recording of {self.path} is lost: {error}", RuntimeWarning, stacklevel=2)

    def stop(self) -> None:
        """Writes what was seen, and lets the module go."""
        with self._lock:
            if not self.active:
                return
            self.active = False
            seen, self._seen = self._seen, []
        atexit.unregister(self.stop)
        module = self._module()
        if module is not None:
            _untap(module, self)
        if self._process != os.getpid():  # a forked child: the file is its parent's
            return
        if not seen:
            warnings.warn(
                f"nothing was recorded to {self.path}: {self._spec.name or 'the collection'} was not called, or only "
                f"by compiled code, which no recording sees; run that eagerly, by {EAGER}",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        features = self._spec.features
        rows = [self._spec.table(feature.table).num_embeddings for feature in features]
        names = [feature.name for feature in features]
        write_trace(self.path, trace_of(names, rows, shape_of(self._spec).digest, seen))


def record_as_environment_says(module: EmbeddingCollection) -> None:
    """Starts a recording of a new collection. Compiled functions of the process run eagerly from here on, so that
    it sees their calls. Of processes that `torchrun` started only the first records."""
    if os.environ.get("RANK", "0") != "0":
        return
    text = os.environ.get(BATCHES_VARIABLE, str(BATCHES))
    if not text.isdecimal():
        raise WorkloadError(f"{BATCHES_VARIABLE}={text!r} is not a whole number; allowed: 1 and more")
    path = checked_target(Path(os.environ[FILE_VARIABLE]), int(text))
    torch.compiler.set_stance("force_eager")
    Recorder(module, numbered(path, next(_made)), int(text))


class _Tap:
    """Stands before a collection's own `lookup`, and shows calls that succeed to all who record it."""

    def __init__(self, module: EmbeddingCollection) -> None:
        self.recorders: list[Recorder] = []
        self._lookup = MethodType(type(module).lookup, module)

    def __call__(self, tables: list[Tensor], batch: Batch, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = self._lookup(tables, batch, rows)
        if not torch.compiler.is_compiling() and _is_real(batch.values):
            for recorder in tuple(self.recorders):
                recorder.see(batch)
        return found


def _tap_of(module: EmbeddingCollection) -> _Tap:
    tap: _Tap = module.__dict__.setdefault(SHADOWED, _Tap(module))
    return tap


def _untap(module: EmbeddingCollection, recorder: Recorder) -> None:
    recorders = _tap_of(module).recorders
    recorders.remove(recorder)
    if not recorders:
        del module.__dict__[SHADOWED]


def _is_real(values: Tensor) -> bool:
    """Whether there are numbers to copy, of a call that somebody made: not a tracer's, a transform's or a repeated
    one's. Under a dispatch mode nothing is copied, because the mode would see the copy."""
    return (
        type(values) is Tensor
        and not values.is_meta
        and functorch_level() is None
        and tracing_state() is None
        and dispatch_modes() == 0
        and current_pass() == -1
        and not (values.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _copied(batch: Batch) -> Seen:
    """On the host, so that neither the caller nor the device can change it."""
    values, offsets, weights = (None if t is None else t.detach().to("cpu", copy=True).numpy() for t in batch[:3])
    assert values is not None and offsets is not None
    return Seen(batch.batch, values, offsets, weights)


def _is_sound(seen: Seen) -> bool:
    """Whether borders fit the ids. On CUDA a call with bad ones fails later than it is seen."""
    borders = seen.offsets
    return bool(borders[0] == 0 and borders[-1] == seen.values.size and (borders[1:] >= borders[:-1]).all())
