"""Prefetching of ids: while a batch is computed, the ids of the next one are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread, current_thread
from typing import Any, NamedTuple, Protocol

import torch

from embforge.sharded.stages.data_distributor import Distributed


class IdsOnTheirWay(NamedTuple):
    """An exchange of ids that has begun, or will begin before any other exchange."""

    thread: Thread
    """The thread that it runs in."""
    arrival: Future[Arrival]


class Arrival(NamedTuple):
    """A batch whose ids have been exchanged."""

    batch: Distributed
    on_stream: torch.cuda.Event | None
    """The event at which a GPU has completed the exchange, on the stream of exchanges; None on the CPU."""


class Distributes(Protocol):
    """The module that looks batches up: a sharded collection."""

    ids_on_their_way: IdsOnTheirWay | None

    @property
    def join_device(self) -> torch.device:
        """The device of its tables."""

    @property
    def joins(self) -> bool:
        """Whether calls are made within torch's Join."""

    @property
    def distribute(self) -> Callable[..., Distributed]:
        """The first half of a call, which exchanges ids."""


class PrefetchedBatches:
    """Iterates over batches: `for item, batch in PrefetchedBatches(module, batches): module(batch)`.

    `arguments` is a function from an item to the arguments with which the module is called: a tuple of positional
    arguments, a dict of keywords, or anything else as `values` alone. Without it, the item itself is taken as such. Ids
    of the next batch are exchanged in a thread while the caller works on the present one; the thread has its own
    process group, and on a GPU its own stream. Every rank must iterate over the same number of batches. An error in a
    batch is raised on all ranks, in the place of that batch.
    """

    def __init__(
        self, module: Distributes, batches: Iterable[Any], arguments: Callable[[Any], Any] | None = None
    ) -> None:
        self.module, self.batches, self.arguments = module, batches, arguments
        self._device = module.join_device

    def __iter__(self) -> Iterator[tuple[Any, Distributed]]:
        if self.module.joins:
            raise ValueError(
                "PrefetchedBatches inside of Join: the ids of a batch would be exchanged before this rank has reported "
                "to the others that it has a batch; call the module with the batches themselves"
            )
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with ThreadPoolExecutor(1, thread_name_prefix="embforge-ids") as pool:
            previous: tuple[Any, Future[Arrival]] | None = None
            thread = pool.submit(current_thread).result()
            for item in self.batches:
                following = (item, pool.submit(self._exchange, item, torch.is_grad_enabled(), stream, self._now()))
                self.module.ids_on_their_way = IdsOnTheirWay(thread, following[1])
                if previous is not None:
                    yield previous[0], self._arrived(previous[1])
                previous = following
            if previous is not None:
                yield previous[0], self._arrived(previous[1])

    def _now(self) -> torch.cuda.Event | None:
        """An event for which the stream of exchanges must wait: the caller's stream may still be making the batch."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _exchange(
        self, item: Any, gradients: bool, stream: torch.cuda.Stream | None, ready: torch.cuda.Event | None
    ) -> Arrival:
        with torch.set_grad_enabled(gradients):
            if stream is None or ready is None:
                return Arrival(self._distribute(item), None)
            with torch.cuda.stream(stream):  # `arguments` may copy to the device, so it runs on this stream too
                stream.wait_event(ready)
                return Arrival(self._distribute(item), stream.record_event())

    def _distribute(self, item: Any) -> Distributed:
        arguments = item if self.arguments is None else self.arguments(item)
        if isinstance(arguments, dict):
            return self.module.distribute(**arguments)
        return self.module.distribute(*(arguments if isinstance(arguments, tuple) else (arguments,)))

    def _arrived(self, arrival: Future[Arrival]) -> Distributed:
        """Waits for an exchange. Returns its batch, ready to be read on the current stream."""
        distributed, event = arrival.result()
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            tensors = [distributed.lengths, distributed.divisors, distributed.slots, *distributed.input[:3]]
            tensors += distributed.local[:3] if distributed.local is not None else ()
            tensors += (
                [distributed.requested.pools, distributed.requested.words] if distributed.requested is not None else []
            )
            for tensor in tensors:  # made on the other stream: torch must not reuse their memory while this one reads
                if tensor is not None:
                    tensor.record_stream(current)
        return distributed
