"""The backends that the conformance suite runs on: all of them, each on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from embforge.codegen.spec import CollectionSpec
from embforge.collection import EmbeddingCollection

BACKENDS = (
    "reference",
    "cpu",
    "simt",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def device_of(backend: str) -> torch.device:
    """Where a backend's tables and batches are."""
    return torch.device("cuda" if backend == "cuda" else "cpu")


def collection(spec: CollectionSpec, backend: Any, **more: Any) -> EmbeddingCollection:
    """A module of the spec for a backend, on the backend's device."""
    return EmbeddingCollection(spec, device=device_of(backend), backend=backend, **more)


@contextmanager
def refusal(module: EmbeddingCollection, error: type[Exception], message: str) -> Iterator[None]:
    """Expects the error in the block, or on a GPU, whose calls never wait, as soon as it is asked for.

    A GPU names the border of a bag that does not fit; the others, which look again, name its neighbour too.
    """
    if module.backend == "cuda" and message.startswith((r"offsets\[", "values has")):
        message = r"offsets\[\d+\] is"
    with pytest.raises(error, match=message):
        yield
        module.check()


def available() -> list[str]:
    """The backends that can be used here."""
    return ["reference", "cpu", "simt", *(["cuda"] if torch.cuda.is_available() else [])]
