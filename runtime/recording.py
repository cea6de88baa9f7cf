"""`ef.record(module, path)`: saves the batches that a module serves, for `embforge tune --workload trace:PATH`.

During a recording, an attribute of the module's instance replaces its `lookup`; at other times recording costs nothing.
Calls in compiled or traced graphs are not recorded, because they run no Python code. Nor are forwards that a backward
pass repeats (torch.utils.checkpoint), because they are no new traffic.
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
    RecordedCall,
    checked_target,
    numbered,
    trace_of,
    write_trace,
)

MOST_BYTES = 2**30
"""The size at which a recording ends, even if it does not have all its batches."""
EAGER = 'torch.compiler.set_stance("force_eager")'

SHADOWED = EmbeddingCollection.lookup.__name__
"""The name of the method that is replaced during a recording."""

_numbers = itertools.count(1)
"""Numbers of the collections that are recorded because of the environment variable."""


def record(module: nn.Module, path: str | Path, batches: int = BATCHES) -> Recording:
    """Starts to record every collection in `module`: the inputs of its next `batches` calls.

    A recording ends, and its file is written, after that many batches; earlier if `stop()` is called, or at the end of
    a `with` block or of the program. There is one file per collection: `path`, then `name-2.npz` and so on in the same
    directory, in the order of `module.modules()`. On a GPU every recorded call waits for the device. Raises
    `WorkloadError` if nothing can be recorded.
    """
    collections = [part for part in module.modules() if isinstance(part, EmbeddingCollection)]
    if not collections:
        raise WorkloadError(f"record: {type(module).__name__} has no EmbeddingCollection in it; pass a module with one")
    path = checked_target(Path(path), batches)
    return Recording(tuple(Recorder(part, numbered(path, i), batches) for i, part in enumerate(collections, start=1)))


class Recording:
    """The recordings of the collections of one model. They stop at the end of a `with` block, or when `stop()` is
    called."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of each collection. No file is written for a collection that is never called."""
        return tuple(recorder.path for recorder in self._recorders)

    @property
    def batches(self) -> tuple[int, ...]:
        """The number of recorded batches of each collection."""
        return tuple(recorder.count for recorder in self._recorders)

    @property
    def active(self) -> bool:
        """Whether any collection is still being recorded."""
        return any(recorder.active for recorder in self._recorders)

    def stop(self) -> None:
        """Ends the recordings and writes their files. Does nothing if they have ended. `OSError` if a file cannot be
        written."""
        for recorder in self._recorders:
            recorder.stop()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class Recorder:
    """Records the calls of one collection to one file, from the moment it is made."""

    def __init__(self, module: EmbeddingCollection, path: Path, batches: int) -> None:
        self.path = path
        self.count = 0
        self.active = True
        self._spec = module.spec
        self._batches = batches
        self._bytes = 0
        self._calls: list[RecordedCall] = []
        self._lock = Lock()  # several threads may call a module
        self._process = os.getpid()
        self._module = weakref.ref(module)  # a recording does not keep tables alive
        _tap_of(module).recorders.append(self)
        atexit.register(self.stop)

    def see(self, batch: Batch) -> None:
        """Copies the input of a call, and ends the recording after the last batch."""
        call = _copied(batch)
        with self._lock:
            if not self.active or self.count >= self._batches or not _is_sound(call):
                return
            self._calls.append(call)
            self.count += 1
            self._bytes += call.nbytes
            full = self.count >= self._batches or self._bytes >= MOST_BYTES
        if full:
            try:
                self.stop()
            except OSError as error:  # only a warning, because the recorded call itself has succeeded
                warnings.warn(f"the recording of {self.path} is lost: {error}", RuntimeWarning, stacklevel=2)

    def stop(self) -> None:
        """Ends the recording and writes its file."""
        with self._lock:
            if not self.active:
                return
            self.active = False
            calls, self._calls = self._calls, []
        atexit.unregister(self.stop)
        module = self._module()
        if module is not None:
            _untap(module, self)
        if self._process != os.getpid():  # a forked child: the file is its parent's
            return
        if not calls:
            warnings.warn(
                f"nothing was recorded to {self.path}: {self._spec.name or 'the collection'} was not called, or only "
                f"by compiled code, which cannot be recorded; run that code eagerly, with {EAGER}",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        features = self._spec.features
        rows = [self._spec.table(feature.table).num_embeddings for feature in features]
        names = [feature.name for feature in features]
        write_trace(self.path, trace_of(names, rows, shape_of(self._spec).digest, calls))


def record_by_environment(module: EmbeddingCollection) -> None:
    """Starts to record a new collection as the environment variables say.

    From now on compiled functions of the process run eagerly, so that their calls can be recorded. Only the first of
    the processes that `torchrun` has started records.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    text = os.environ.get(BATCHES_VARIABLE, str(BATCHES))
    if not text.isdecimal():
        raise WorkloadError(f"{BATCHES_VARIABLE}={text!r} is not a whole number; allowed: 1 or more")
    path = checked_target(Path(os.environ[FILE_VARIABLE]), int(text))
    torch.compiler.set_stance("force_eager")
    Recorder(module, numbered(path, next(_numbers)), int(text))


class _Tap:
    """Replaces the `lookup` of a collection: calls the original, and passes successful calls to all recorders."""

    def __init__(self, module: EmbeddingCollection) -> None:
        self.recorders: list[Recorder] = []
        self._lookup = MethodType(type(module).lookup, module)

    def __call__(self, tables: list[Tensor], batch: Batch, rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = self._lookup(tables, batch, rows)
        if not torch.compiler.is_compiling() and _is_real(batch.values):
            for recorder in tuple(self.recorders):
                recorder.see(batch)
        return result


def _tap_of(module: EmbeddingCollection) -> _Tap:
    tap: _Tap = module.__dict__.setdefault(SHADOWED, _Tap(module))
    return tap


def _untap(module: EmbeddingCollection, recorder: Recorder) -> None:
    recorders = _tap_of(module).recorders
    recorders.remove(recorder)
    if not recorders:
        del module.__dict__[SHADOWED]


def _is_real(values: Tensor) -> bool:
    """Whether a call has numbers to copy and comes from the program itself, not from a tracer, a transform or a
    backward pass that repeats a forward. Under a dispatch mode nothing is copied, because the mode would see the
    copy."""
    return (
        type(values) is Tensor
        and not values.is_meta
        and functorch_level() is None
        and tracing_state() is None
        and dispatch_modes() == 0
        and current_pass() == -1
        and not (values.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _copied(batch: Batch) -> RecordedCall:
    """A copy of a call's input on the host, which neither the caller nor the device can change."""
    values, offsets, weights = (None if t is None else t.detach().to("cpu", copy=True).numpy() for t in batch[:3])
    assert values is not None and offsets is not None
    return RecordedCall(batch.batch, values, offsets, weights)


def _is_sound(call: RecordedCall) -> bool:
    """Whether the borders of bags fit the ids. On CUDA a call with bad borders fails only after it was recorded."""
    borders = call.offsets
    return bool(borders[0] == 0 and borders[-1] == call.values.size and (borders[1:] >= borders[:-1]).all())
