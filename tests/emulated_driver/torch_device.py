"""torch's CUDA device on the emulated driver: what a CPU build of torch lacks, as far as a lookup needs it.

A tensor on an emulated device says that it is on "cuda:0" and holds memory that the driver gave. Filling, copying and
what a backward does between its kernels are put into torch's current stream as torch does it; any other operation waits
for that stream and is done at once. Autograd is torch's own: to its engine, which knows no emulated device, the tensors
are of a CPU, so that a backward pass runs in the thread that asked for it.
`torch.cuda`'s functions that the package uses are replaced while `emulated()` lasts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from embforge import id_resolution, lookups
from embforge.operators import lookup as ops
from embforge.operators.dispatch import has_numbers, must_dispatch
from emulated_driver import control
from emulated_driver import torch_cuda as cuda
from emulated_driver.control import driver_call

REPLACED = (
    *("Event", "current_device", "current_stream", "device", "get_device_capability", "get_device_properties"),
    *("is_available", "is_current_stream_capturing", "synchronize"),
)
"""The functions of `torch.cuda` that are replaced."""
FACTORIES = (torch.empty, torch.zeros, torch.tensor, torch.full, torch.ones, torch.arange, torch.empty_like)
MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.numpy)
"""What torch reads on the host, once the stream has come so far."""
VIEWS = (Tensor.view, Tensor.split, Tensor.__getitem__, Tensor.expand_as)
LOOKS = (
    *(Tensor.data_ptr, Tensor.numel, Tensor.dim, Tensor.size, Tensor.stride, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.detach, *VIEWS),
)
"""What torch answers without the device's help."""
QUEUED = (torch.sort, torch.cumsum, Tensor.scatter_)
"""What waits for its turn in the stream. Writes to tensors that exist: to `out`, or to the first argument."""
PLACES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda place: place,
    "is_cuda": lambda place: True,
    "is_cpu": lambda place: False,
    "get_device": lambda place: place.index,
}
"""What a tensor says of where it is."""
RECORDED = (
    *("requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "retain_grad", "retains_grad", "_version"),
    *("backward", "register_hook", "register_post_accumulate_grad_hook"),
)
"""What autograd knows of a tensor, or is asked to do."""


class DeviceTensor(Tensor):
    """A tensor on an emulated device. `inner` is the same memory as a tensor that this CPU can read."""

    inner: Tensor
    place: torch.device

    @staticmethod
    def of(inner: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DeviceTensor, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="cpu"
        )
        made.inner, made.place = inner, device
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What autograd leaves to be done of an operation that it records, and what its engine does by itself."""
        ours = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
        with torch._C.DisableTorchFunction():
            return _done_at_once(func, ours, args, kwargs or {})


class _Everything(TorchFunctionMode):
    """Also sees calls that have no emulated tensor among their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ours = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    operator = OPERATORS.get(func)
    if operator is not None and ours:  # they call functions that serve all devices
        with _Everything():
            return operator(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        if func in FACTORIES:
            return _made(func, args, kwargs)
        if func in MOVES:
            return _moved(func, args, kwargs)
        if not ours or _name(func) in RECORDED:
            return func(*args, **kwargs)
        if _name(func) in PLACES:
            return PLACES[_name(func)](ours[0].place)
        if torch.is_grad_enabled() and _is_recorded(func) and any(x.requires_grad for x in ours):
            return func(*args, **kwargs)
        if func is Tensor.zero_ and ours[0].inner.is_contiguous():
            return _zeroed(ours[0])
        if func is Tensor.contiguous and ours[0].inner.is_contiguous():
            return ours[0]
        if func is Tensor.copy_:
            return _copied(*args, **kwargs)
        if func in QUEUED:
            return _queued(func, ours[0].place, args, kwargs)
        if func in READS:
            return func(_down(ours[0]))
        if func is Tensor.set_:  # another view of memory
            return DeviceTensor.of(ours[0].inner.set_(*args[1:], **kwargs), ours[0].place)
        return _done_at_once(func, ours, args, kwargs)


class _LookupTrain(torch.autograd.Function):
    """The operator of a training lookup, by the functions that it is registered with."""

    @staticmethod
    def forward(*words: Any) -> Any:
        return ops._lookup_train(*words)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ops._keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        there = [x.to(ctx.hyper.place) for x in gradients]  # for a result that was not used the engine makes zeros
        found = ops._train(ctx, *there)
        return tuple(None if isinstance(x, list) else x for x in found)


OPERATORS = {
    ops.lookup: ops._lookup,
    ops.lookup_train: _LookupTrain.apply,
    torch.ops.embforge.update_: ops._update,
    torch.ops.embforge.weight_gradient: ops._weight_gradient,
}


def _is_recorded(func: Any) -> bool:
    """Whether autograd must see it: it may have a gradient."""
    return func in VIEWS or (func not in LOOKS and func not in READS and func.__name__ not in ("__get__", "__set__"))


def _name(func: Any) -> str:
    """A method's name, or that of the attribute that it gets."""
    return str(getattr(getattr(func, "__self__", func), "__name__", ""))


def _done_at_once(func: Any, ours: list[DeviceTensor], args: Any, kwargs: Any) -> Any:
    device = ours[0].place
    before = {id(x.inner): x for x in ours}
    memories = {x.inner.untyped_storage().data_ptr() for x in ours}
    if func not in LOOKS and func.__name__ != "__get__":
        cuda.synchronise_stream(device)
    words, named = pytree.tree_map_only(DeviceTensor, lambda x: x.inner, (args, kwargs))

    def wrapped(made: Tensor) -> Tensor:
        if id(made) in before:
            if func not in LOOKS:
                _mark_written(made)
                torch.autograd.graph.increment_version(before[id(made)])
            return before[id(made)]
        if made.untyped_storage().data_ptr() in memories:
            return DeviceTensor.of(made, device)
        return _up(made, device)

    return pytree.tree_map_only(Tensor, wrapped, func(*words, **named))


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in memory. Like a kernel, work that waits in a stream knows nothing else of the tensor."""

    device: int
    address: int
    like: Tensor

    @classmethod
    def of(cls, tensor: DeviceTensor) -> _Place:
        inner = tensor.inner
        like = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")
        return cls(tensor.place.index, inner.data_ptr(), like)

    def tensor(self) -> Tensor:
        like = self.like
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        reach = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        count = (reach + 1) * like.element_size()
        assert control.holds(self.device, self.address, count), f"{count} bytes at {self.address:#x} are not there"
        return _tensor_at((ctypes.c_uint8 * count).from_address(self.address), like)


def _queued(func: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its turn comes in the current stream."""
    written = kwargs.get("out", args[0])
    places = pytree.tree_map_only(DeviceTensor, _Place.of, (args, kwargs))
    if func is torch.sort:
        cuda.allocated(device, args[0].inner.nbytes)  # work space, given back at once, as torch's

    def run() -> None:
        with torch._C.DisableTorchFunction():
            words, named = pytree.tree_map_only(_Place, _Place.tensor, places)
            func(*words, **named)
            for tensor in pytree.tree_leaves(named.get("out", words[0])):
                _mark_written(tensor)

    with cuda.device(device):
        control.enqueue(cuda.current_stream(device).cuda_stream, run)
    return written


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    if args and isinstance(args[0], DeviceTensor):
        device, args = device or args[0].place, (args[0].inner, *args[1:])
    if pinned:
        like = func(*args, **kwargs, device="meta")
        return _tensor_at(cuda.pinned(like.nbytes), like)
    if device is None or torch.device(device).type != "cuda":
        return func(*args, **kwargs, device=device)  # type: ignore[no-any-return]
    place = cuda.indexed(torch.device(device))
    if kwargs.pop("requires_grad", False):
        return _made(func, args, {**kwargs, "device": place}).requires_grad_()
    if func in (torch.empty, torch.empty_like, torch.zeros):
        like = func(*args, **kwargs, device="meta")
        fresh = _fresh(like, place)
        return _zeroed(fresh) if func is torch.zeros else fresh
    return _up(func(*args, **kwargs), place)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    source, *words = args
    target = kwargs.get("device", "cpu" if func is Tensor.cpu else "cuda" if func is Tensor.cuda else None)
    dtype = kwargs.get("dtype")
    for word in words:
        target = word if isinstance(word, str | torch.device) else target
        dtype = word if isinstance(word, torch.dtype) else dtype
    here = source.place if isinstance(source, DeviceTensor) else source.device
    place = here if target is None else torch.device(target)
    if place.type != "cuda" and not isinstance(source, DeviceTensor):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    place = cuda.indexed(place) if place.type == "cuda" else place
    if here == place and dtype in (None, source.dtype):
        return source  # type: ignore[no-any-return]
    host = _down(source) if isinstance(source, DeviceTensor) else source
    host = host.to(dtype or host.dtype)
    return _up(host, place) if place.type == "cuda" else host.to(place)


def _fresh(like: Tensor, device: torch.device) -> DeviceTensor:
    """Memory of a device for such a tensor. It is given back in stream order, when no tensor uses it any more."""
    if like.numel() == 0:
        return DeviceTensor.of(torch.empty(like.shape, dtype=like.dtype), device)
    return DeviceTensor.of(_tensor_at(cuda.allocated(device, like.nbytes), like), device)


def _tensor_at(memory: Any, like: Tensor) -> Tensor:
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _zeroed(tensor: DeviceTensor) -> DeviceTensor:
    if tensor.inner.numel():
        with cuda.device(tensor.place):
            stream = cuda.current_stream(tensor.place).cuda_stream
            driver_call("cuMemsetD8Async", tensor.inner.data_ptr(), 0, tensor.inner.nbytes, stream)
    return tensor


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As torch: in the order of the current stream; the host waits if it is involved and did not say otherwise."""
    ours = [x for x in (target, source) if isinstance(x, DeviceTensor)]
    ends = [x.inner if isinstance(x, DeviceTensor) else x for x in (target, source)]
    device = ours[0].place
    if ends[0].shape != ends[1].shape or ends[0].dtype != ends[1].dtype or not all(x.is_contiguous() for x in ends):
        return _done_at_once(Tensor.copy_, ours, (target, source), {})  # type: ignore[no-any-return]
    if ends[0].numel():
        with cuda.device(device):
            stream = cuda.current_stream(device).cuda_stream
            driver_call("cuMemcpyAsync", ends[0].data_ptr(), ends[1].data_ptr(), ends[0].nbytes, stream)
        if not non_blocking:
            cuda.synchronise_stream(device)
    return target


def _up(host: Tensor, device: torch.device) -> DeviceTensor:
    whole = host.contiguous()
    place = _fresh(whole, device)
    _copied(place, whole)
    return place


def _down(tensor: DeviceTensor) -> Tensor:
    cuda.synchronise_stream(tensor.place)
    return tensor.inner.clone()


def _mark_written(inner: Tensor) -> None:
    runs = [inner] if inner.is_contiguous() else inner.unbind(0)
    for run in runs:
        if run.numel():
            control.wrote(run.data_ptr(), run.nbytes)


_run_thread = threading.Thread.run


def _run_thread_emulated(thread: threading.Thread) -> None:
    with _Everything():
        _run_thread(thread)


_run_engine = torch.autograd._engine_run_backward


def _run_engine_emulated(*words: Any, **named: Any) -> Any:
    """Who asked for a backward pass is served by now; what it calls is not."""
    with torch._C._EnableTorchFunction(), _Everything():
        return _run_engine(*words, **named)


def _as_plain(function: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
    """Answers whether a tensor is a plain one: emulated tensors count as plain."""
    return lambda values: function(values.inner if isinstance(values, DeviceTensor) else values)


@contextmanager
def emulated() -> Iterator[None]:
    """While this lasts, "cuda:0" and "cuda:1" are devices of the emulated driver, also in threads that are started."""
    driver_call("cuInit", 0)
    replaced = {name: getattr(cuda, name) for name in REPLACED}
    threads = mock.patch.object(threading.Thread, "run", _run_thread_emulated)
    engine = mock.patch.object(torch.autograd, "_engine_run_backward", _run_engine_emulated)
    seen = _as_plain(must_dispatch)
    plain = mock.patch.multiple(lookups, must_dispatch=seen, has_numbers=_as_plain(has_numbers))
    resolving = mock.patch.object(id_resolution, "must_dispatch", seen)
    with mock.patch.multiple(torch.cuda, **replaced), threads, engine, plain, resolving, _Everything():
        yield
