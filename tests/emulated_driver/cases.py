"""What the checks of the launcher share: a spec that has every kernel, its image, and calls on emulated devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.build import build
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.stages import StagePlan
from embforge.inputs import Batch
from embforge.launch import metadata
from embforge.launch.reference import forward as reference
from embforge.verify.cases import Case, Drawn, draw_batch, draw_tables

DEVICE = torch.device("cuda:0")

SPEC = CollectionSpec(
    (TableSpec("a", 100, 8), TableSpec("b", 50, 5, "fp16"), TableSpec("w", 30, 64, "fp8_e4m3")),
    (
        FeatureSpec("sum", "a"),
        FeatureSpec("mean", "b", "mean", weighted=True),
        FeatureSpec("rows", "b", "none"),
        FeatureSpec("concat", "a", "concat", hotness=2, weighted=True),
        FeatureSpec("max", "w", "max", padding_idx=3),
        FeatureSpec("sqrtn", "a", "sqrtn", weighted=True),
    ),
    output_dtype="bf16",
    name="emulated",
)
"""Two register classes, long bags whose kernel needs more shared memory than it gets unasked, a sequence output."""

PLAN = Plan("forward", "cuda", "sm_90", "int64", SPEC, CudaParams(long_bag=256))


@cache
def image(plan: Plan | StagePlan = PLAN) -> bytes:
    """The SIMT image that replaces the plan's cubin."""
    return build(replace(plan, target="simt")).binary.read_bytes()


@dataclass(frozen=True)
class Given:
    """A batch and its tables on the host, and the same on a device."""

    tables: tuple[Tensor, ...]
    drawn: Drawn
    device_tables: tuple[Tensor, ...]
    batch: Batch
    sequence_elements: int

    def call(self, forward: object, bounds_check: str = "error") -> tuple[Tensor, Tensor | None]:
        """The launcher's call."""
        words = metadata.metadata_of(self.device_tables, bounds_check)
        return forward(words, self.device_tables, self.batch, self.sequence_elements, bounds_check)  # type: ignore[operator,no-any-return]

    def assert_right(self, result: tuple[Tensor, Tensor | None], bounds_check: str = "error") -> None:
        """Waits for the stream and compares all bits with the reference."""
        wanted = reference.lookup(SPEC, *self.drawn, self.tables, bounds_check=bounds_check)
        for got, want in zip(result, wanted, strict=True):
            assert got is not None
            assert_same_bits(got.cpu(), want)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    words = torch.int16 if got.element_size() == 2 else torch.int32
    different = ((got.view(words) != want.view(words)) & ~(got.isnan() & want.isnan())).nonzero()
    assert not len(different), f"{len(different)} of {got.numel()} numbers differ, the first at {different[0].tolist()}"


def given(case: Case, seed: int = 0, device: torch.device = DEVICE, special: bool = False) -> Given:
    """A batch of SPEC with edge cases."""
    return _given(draw_batch(SPEC, case, seed), seed, device, special)


def given_long(seed: int = 0, device: torch.device = DEVICE) -> Given:
    """Three samples with a bag in each pooled feature that takes the kernels for long bags."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [300 if f.pooling not in ("none", "concat") else 1 for f in SPEC.features]
    offsets = torch.tensor([0] + [n for length in lengths for n in (2, length, 0)]).cumsum(0)
    values = torch.randint(30, (int(offsets[-1]),), generator=generator)
    return _given(Drawn(values, offsets, torch.randn(len(values), generator=generator)), seed, device, False)


def _given(drawn: Drawn, seed: int, device: torch.device, special: bool) -> Given:
    size = (len(drawn.offsets) - 1) // len(SPEC.features)
    rows = int(drawn.offsets[3 * size] - drawn.offsets[2 * size])
    values, borders, weights = (None if x is None else x.to(device) for x in drawn)
    assert values is not None
    assert borders is not None
    return Given(
        draw_tables(SPEC, seed, special),
        drawn,
        draw_tables(SPEC, seed, special, device),
        Batch(values, borders, weights, size, None),
        rows * 5,
    )


def with_batch(here: Given, **changes: Tensor) -> Given:
    """The same, with some of the batch replaced on the device."""
    device = here.batch.values.device
    batch = here.batch._replace(**{name: tensor.to(device) for name, tensor in changes.items()})
    return replace(here, batch=batch)


def bad_id(value: int = 77, device: torch.device = DEVICE) -> Given:
    """An id that table 'b' does not have, of the second feature."""
    here = given(Case(4, "one"), device=device)
    values = here.drawn.values.clone()
    values[5] = value
    return with_batch(here, values=values)


BAD_ID = r"feature 'mean': id 77 of sample 1, position 0 is not a row of table 'b'; allowed: 0 to 49"
"""What is said of it."""


def untouched(tensor: Any) -> bool:
    """Whether fresh device memory has not been written to yet."""
    return bool((tensor.inner.view(torch.uint8) == 0xEB).all())
