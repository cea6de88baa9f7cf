"""torch's CUDA device on the emulated driver: what a CPU build of torch lacks, as far as a lookup needs it.

A tensor on an emulated device says that it is on "cuda:0" and holds memory that the driver gave. Filling and copying
are put into torch's current stream as torch does it; any other operation waits for that stream and is done at once.
`torch.cuda`'s functions that the package uses are replaced while `emulated()` lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from embforge import ops
from emulated_driver import control
from emulated_driver import torch_cuda as cuda
from emulated_driver.control import driver_call

REPLACED = (
    *("Event", "current_device", "current_stream", "device", "get_device_capability", "get_device_properties"),
    *("is_available", "is_current_stream_capturing", "synchronize"),
)
"""Of `torch.cuda`."""
FACTORIES = (torch.empty, torch.zeros, torch.tensor, torch.full, torch.ones, torch.arange, torch.empty_like)
MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.numpy)
"""What torch reads on the host, once the stream has come so far."""
LOOKS = (
    *(Tensor.data_ptr, Tensor.numel, Tensor.dim, Tensor.size, Tensor.stride, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.detach, Tensor.requires_grad_, Tensor.view, Tensor.split, Tensor.__getitem__),
)
"""What torch answers without the device's help."""
PLACES = ("device", "is_cuda", "is_cpu", "get_device")


class DeviceTensor(Tensor):
    """A tensor on an emulated device. `inner` is the same memory as a tensor that this CPU can read."""

    inner: Tensor

    @staticmethod
    def of(inner: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            DeviceTensor, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} came past __torch_function__")


class _Everything(TorchFunctionMode):
    """Sees also the calls that have no tensor of ours among their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ours = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    if func is ops.lookup and ours:  # the function behind it serves all devices
        with _Everything():
            return ops._lookup(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        if func in FACTORIES:
            return _made(func, args, kwargs)
        if func in MOVES:
            return _moved(func, args, kwargs)
        if not ours or _name(func) in PLACES:
            return func(*args, **kwargs)
        if func is Tensor.zero_ and ours[0].inner.is_contiguous():
            return _zeroed(ours[0])
        if func is Tensor.copy_:
            return _copied(*args, **kwargs)
        if func in READS:
            return func(_down(ours[0]))
        return _done_at_once(func, ours, args, kwargs)


def _name(func: Any) -> str:
    """A method's name, or that of the attribute that it gets."""
    return str(getattr(getattr(func, "__self__", func), "__name__", ""))


def _done_at_once(func: Any, ours: list[DeviceTensor], args: Any, kwargs: Any) -> Any:
    device = ours[0].device
    before = {id(x.inner): x for x in ours}
    memories = {x.inner.untyped_storage().data_ptr() for x in ours}
    if func not in LOOKS and func.__name__ != "__get__":
        cuda.synchronise_stream(device)
    words, named = pytree.tree_map_only(DeviceTensor, lambda x: x.inner, (args, kwargs))

    def wrapped(made: Tensor) -> Tensor:
        if id(made) in before:
            if func not in LOOKS:
                _mark_written(made)
            return before[id(made)]
        if made.untyped_storage().data_ptr() in memories:
            return DeviceTensor.of(made, device)
        return _up(made, device)

    return pytree.tree_map_only(Tensor, wrapped, func(*words, **named))


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    if args and isinstance(args[0], DeviceTensor):
        device, args = device or args[0].device, (args[0].inner, *args[1:])
    if pinned:
        like = func(*args, **kwargs, device="meta")
        return _tensor_at(cuda.pinned(like.nbytes), like)
    if device is None or torch.device(device).type != "cuda":
        return func(*args, **kwargs, device=device)  # type: ignore[no-any-return]
    place = cuda.indexed(torch.device(device))
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
    place = source.device if target is None else torch.device(target)
    if place.type != "cuda" and not isinstance(source, DeviceTensor):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    place = cuda.indexed(place) if place.type == "cuda" else place
    if source.device == place and dtype in (None, source.dtype):
        return source  # type: ignore[no-any-return]
    host = _down(source) if isinstance(source, DeviceTensor) else source
    host = host.to(dtype or host.dtype)
    return _up(host, place) if place.type == "cuda" else host.to(place)


def _fresh(like: Tensor, device: torch.device) -> DeviceTensor:
    """Memory of a device for such a tensor. It goes back in stream order, when nobody holds it any more."""
    if like.numel() == 0:
        return DeviceTensor.of(torch.empty(like.shape, dtype=like.dtype), device)
    return DeviceTensor.of(_tensor_at(cuda.allocated(device, like.nbytes), like), device)


def _tensor_at(memory: Any, like: Tensor) -> Tensor:
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _zeroed(tensor: DeviceTensor) -> DeviceTensor:
    if tensor.inner.numel():
        with cuda.device(tensor.device):
            stream = cuda.current_stream(tensor.device).cuda_stream
            driver_call("cuMemsetD8Async", tensor.inner.data_ptr(), 0, tensor.inner.nbytes, stream)
    return tensor


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As torch: in the order of the current stream; the host waits if it is involved and did not say otherwise."""
    ends = [x.inner if isinstance(x, DeviceTensor) else x for x in (target, source)]
    device = (target if isinstance(target, DeviceTensor) else source).device
    if ends[0].shape != ends[1].shape or ends[0].dtype != ends[1].dtype or not all(x.is_contiguous() for x in ends):
        return _done_at_once(
            Tensor.copy_, [x for x in (target, source) if isinstance(x, DeviceTensor)], (target, source), {}
        )  # type: ignore[no-any-return]
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
    cuda.synchronise_stream(tensor.device)
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


@contextmanager
def emulated() -> Iterator[None]:
    """While this lasts, "cuda:0" and "cuda:1" are devices of the emulated driver, also in threads that are started."""
    driver_call("cuInit", 0)
    replaced = {name: getattr(cuda, name) for name in REPLACED}
    threads = mock.patch.object(threading.Thread, "run", _run_thread_emulated)
    with mock.patch.multiple(torch.cuda, **replaced), threads, _Everything():
        yield
