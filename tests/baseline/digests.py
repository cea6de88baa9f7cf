"""Short hashes of tensors, equal if and only if all bits are; which of its bit patterns a NaN has does not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

DIGITS = 12
Digests = dict[str, str]
"""The digests of a case: a short hash for each result, by its name."""


def short(digest: bytes) -> str:
    """The first digits of a hash, for people and for small files."""
    return digest.hex()[:DIGITS]


def canonical_bytes(tensor: Tensor) -> bytes:
    """Format, shape and numbers of a tensor, with one bit pattern for all NaNs."""
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    head = f"{flat.dtype} {tuple(tensor.shape)} ".encode()
    if not flat.numel():
        return head
    size = flat.element_size()
    bits = flat.view(torch.uint8).view(-1, size)
    if flat.is_floating_point():  # torch has no isnan for narrow formats
        bits = bits.masked_fill(flat.double().isnan()[:, None], 0xFF)
    return head + bits.numpy().tobytes()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """One digest of several tensors in their order."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(canonical_bytes(tensor))
    return short(whole.digest())


def digests_of(results: Iterable[Mapping[str, Tensor]]) -> Digests:
    """By name: one digest of all tensors that had the name, in the order in which they came."""
    found: dict[str, list[Tensor]] = {}
    for result in results:
        for name, tensor in result.items():
            found.setdefault(name, []).append(tensor)
    return {name: digest_of(tensors) for name, tensors in found.items()}


def joined(digests: Mapping[str, str]) -> str:
    """One digest of several, whatever their order."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return short(hashlib.sha256(text.encode()).digest())
