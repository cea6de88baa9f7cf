"""The exchange of ids ahead of time: while a batch computes, the ids of the next one travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread, current_thread
from typing import Any, NamedTuple, Protocol

import torch

from embforge.sharded.stages.data_distributor import Distributed


class IdsOnTheirWay(NamedTuple):
    """An exchange of ids that has begun, or will before any other."""

    thread: Thread
    """The one that it runs in."""
    arrival: Future[Arrival]


class Arrival(NamedTuple):
    """A batch whose ids were exchanged."""

    batch: Distributed
    on_stream: torch.cuda.Event | None
    """When a GPU is done with it, on a stream of its own."""


class Distributes(Protocol):
    """What batches are given to: a sharded collection."""

    ids_on_their_way: IdsOnTheirWay | None

    @property
    def join_device(self) -> torch.device:
        """Where its tables are."""

    @property
    def joins(self) -> bool:
        """Whether it is called inside of torch's Join."""

    @property
    def distribute(self) -> Callable[..., Distributed]:
        """The first half of a call, which exchanges ids."""


class PrefetchedBatches:
    """Iterates over batches: `for item, done in PrefetchedBatches(module, batches): module(done)`.

    `arguments` takes an item to what the module is called with: a tuple of positional arguments (the item itself, if
    it is
    not given) or anything that is `values` alone. Ids of the next batch are exchanged in a thread, through a group
    of its
    own and on a GPU on a stream of its own, while the caller works on this one. Every rank must go through as many
    batches;
    an error in a batch is raised where the batch would have come, on all ranks.
    """

    def __init__(
        self, module: Distributes, batches: Iterable[Any], arguments: Callable[[Any], Any] | None = None
    ) -> None:
        self.module, self.batches, self.arguments = module, batches, arguments
        self._device = module.join_device

    def __iter__(self) -> Iterator[tuple[Any, Distributed]]:
        if self.module.joins:
            raise ValueError(
                "PrefetchedBatches inside of Join: ids of a batch would be exchanged before the rank has told that it "
                "has one; call the module with the batches themselves"
            )
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with ThreadPoolExecutor(1, thread_name_prefix="embforge-ids") as pool:
            waiting: tuple[Any, Future[Arrival]] | None = None
            thread = pool.submit(current_thread).result()
            for item in self.batches:
                coming = (item, pool.submit(self._exchange, item, torch.is_grad_enabled(), stream, self._now()))
                self.module.ids_on_their_way = IdsOnTheirWay(thread, coming[1])
                if waiting is not None:
                    yield waiting[0], self._arrived(waiting[1])
                waiting = coming
            if waiting is not None:
                yield waiting[0], self._arrived(waiting[1])

    def _now(self) -> torch.cuda.Event | None:
        """What the ids' stream must wait for: whoever made the batch on the caller's stream."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _exchange(
        self, item: Any, gradients: bool, stream: torch.cuda.Stream | None, made: torch.cuda.Event | None
    ) -> Arrival:
        with torch.set_grad_enabled(gradients):
            if stream is None or made is None:
                return Arrival(self._distribute(item), None)
            with torch.cuda.stream(stream):  # also what `arguments` copies to the device is in its order
                stream.wait_event(made)
                return Arrival(self._distribute(item), stream.record_event())

    def _distribute(self, item: Any) -> Distributed:
        given = item if self.arguments is None else self.arguments(item)
        if isinstance(given, dict):
            return self.module.distribute(**given)
        return self.module.distribute(*(given if isinstance(given, tuple) else (given,)))

    def _arrived(self, coming: Future[Arrival]) -> Distributed:
        done, event = coming.result()
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            kept = [done.lengths, done.divisors, done.slots, *done.given[:3]]
            kept += done.local[:3] if done.local is not None else ()
            kept += [done.wanted.pools, done.wanted.words] if done.wanted is not None else []
            for tensor in kept:  # made on the other stream: its memory must not be given away while this one reads it
                if tensor is not None:
                    tensor.record_stream(current)
        return done
