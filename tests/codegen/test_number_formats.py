"""Every narrow format of tables: its facts are torch's, and its codes and its borders of rounding are respected by the
reference, by each instruction set that runs here and by the emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES, FLOATS, TABLE_DTYPES, WIRE, WIRE_FORMATS, Float, narrow_floats
from embforge.codegen.layout import TableLayout
from embforge.codegen.machine import X86_NEEDS, host_isa
from embforge.codegen.params import CpuBackwardParams, CpuParams, CudaBackwardParams, CudaParams, ReferenceParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import metadata_of, update_metadata_of
from embforge.number_formats import as_indexable, torch_dtype
from embforge.storage.states import allocate_section
from embforge.storage.static import allocate

NARROW = narrow_floats(TABLE_DTYPES)
every_format = pytest.mark.parametrize("form", NARROW, ids=lambda form: form.name)
DIM = 8
CODES = {8: torch.uint8, 16: torch.int16}
MANY = 4000
"""The most numbers of one format that the emulated GPU rounds."""
PARAMS: dict[str, dict[str, Any]] = {
    "forward": {"cpu": CpuParams(), "simt": CudaParams()},
    "backward": {"cpu": CpuBackwardParams(), "simt": CudaBackwardParams()},
}


def cpus() -> list[tuple[str, str]]:
    """This machine's instruction set and what it includes."""
    order = [*X86_NEEDS, "generic"]
    best = host_isa()
    return [("cpu", isa) for isa in (order[order.index(best) :] if best in order else [best, "generic"])]


def kernel_for(op: str, target: str, arch: str, spec: CollectionSpec) -> Any:
    update = Update(builtin.sgd(), "nearest") if op == "backward" else None
    params = ReferenceParams() if target == "reference" else PARAMS[op][target]
    return kernel_of(Program(Plan(op, target, arch, "int64", spec, params, update)).text)


def spec_of(numbers: dict[str, Tensor]) -> CollectionSpec:
    tables = tuple(TableSpec(name, len(rows), DIM, name) for name, rows in numbers.items())  # type: ignore[arg-type]
    return CollectionSpec(tables, tuple(FeatureSpec(t.name, t.name, "none") for t in tables), name="formats")


def batch_of_all_rows(spec: CollectionSpec) -> Batch:
    """A sample whose bags hold every row once, in order."""
    counts = [table.num_embeddings for table in spec.tables]
    values = torch.cat([torch.arange(count) for count in counts])
    return Batch(values, torch.tensor([0, *counts]).cumsum(0), None, 1, None)


def table_of(layout: TableLayout, codes: Tensor) -> Tensor:
    """A table whose rows hold these bits, with the strides of the layout."""
    table = allocate(layout, torch.device("cpu"))
    table.copy_(codes.view(table.dtype))
    return table


def all_codes(form: Float) -> Tensor:
    return torch.arange(1 << form.bits, dtype=torch.int32).to(CODES[form.bits])


def bits_of(numbers: Tensor, form: Float) -> Tensor:
    return numbers.contiguous().view(CODES[form.bits])


def by_definition(form: Float, code: int) -> float:
    """The number that a code without its sign stands for, by the facts of its format."""
    if code > form.largest_code:
        return torch.inf if code == form.infinity else torch.nan
    exponent, fraction = code >> form.mantissa_bits, code & (1 << form.mantissa_bits) - 1
    if not exponent:
        return fraction * form.smallest
    return (1 + fraction * form.resolution) * 2.0 ** (exponent - form.bias)


@every_format
def test_facts_of_formats_equal_those_of_torch(form: Float) -> None:
    info, numbers = torch.finfo(torch_dtype(form.name)), all_codes(form).view(torch_dtype(form.name)).float()
    assert (info.bits, info.max, info.eps) == (form.bits, form.largest, form.resolution)
    assert (info.smallest_normal, info.min) == (form.smallest_normal, -form.largest)
    positive = torch.tensor([by_definition(form, code) for code in range(1 << form.bits - 1)])
    for found, wanted in ((numbers[: len(positive)], positive), (numbers[len(positive) :], -positive)):
        assert torch.equal(found.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
        assert torch.equal(found.isnan(), wanted.isnan())
    assert int(bits_of(torch.tensor(torch.nan).to(torch_dtype(form.name)), form)) & 0x7FFF == form.nan


def test_one_entry_names_a_format_everywhere() -> None:
    assert set(TABLE_DTYPES) <= FLOATS.keys() and WIRE.keys() == set(WIRE_FORMATS)
    for what in ("name", "torch_name", "c_type"):
        assert len({getattr(dtype, what) for dtype in DTYPES.values()}) == len(DTYPES), what
    spellings = [spelling for dtype in DTYPES.values() for spelling in (*dtype.spellings, *dtype.slips)]
    assert len({spelling.lower() for spelling in spellings}) == len(set(spellings))
    for dtype in DTYPES.values():
        assert getattr(torch, dtype.torch_name).itemsize == dtype.bytes


@pytest.mark.parametrize(
    ("target", "arch"), [("reference", "generic"), *cpus(), ("simt", "sm_75"), ("simt", "sm_90")], ids=str
)
def test_every_code_is_decoded(target: str, arch: str) -> None:
    codes = {form.name: all_codes(form).view(-1, DIM) for form in NARROW}
    spec = spec_of(codes)
    kernel = kernel_for("forward", target, arch, spec)
    tables = [table_of(layout, rows) for layout, rows in zip(kernel.plan.layout.tables, codes.values(), strict=True)]
    wanted = torch.cat([rows.view(torch_dtype(name)).float().flatten() for name, rows in codes.items()])
    _, found = kernel(metadata_of(tables, "error"), tables, batch_of_all_rows(spec), wanted.numel(), "error")
    right = (found == wanted) & (found.signbit() == wanted.signbit()) | found.isnan() & wanted.isnan()
    assert right.all(), (~right).nonzero().flatten().tolist()[:9]


def borders(form: Float, most: int | None) -> Tensor:
    """Numbers halfway between neighbours, just below and just above, also past the largest; of both signs."""
    exact = torch.tensor([by_definition(form, code) for code in range(form.largest_code + 1)], dtype=torch.float64)
    exact = torch.cat([exact, 2 * exact[-1:] - exact[-2:-1]])
    halfway = ((exact[:-1] + exact[1:]) / 2).float()
    below, above = (torch.nextafter(halfway, torch.tensor(end)) for end in (0.0, torch.inf))
    numbers = torch.stack([halfway, below, above], 1).flatten()
    if most is not None and len(numbers) > most:
        edge = most // 4
        inner = numbers[edge:-edge]
        numbers = torch.cat([numbers[:edge], inner[:: -(-len(inner) // (2 * edge))], numbers[-edge:]])
    numbers = torch.cat([numbers, torch.tensor([torch.finfo(torch.float32).max, 1e-45])])
    signs = torch.ones(len(numbers))
    signs[::2] = -1
    numbers = torch.cat([numbers * signs, -numbers * signs])
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % DIM), value=1.0).view(-1, DIM)


@pytest.mark.parametrize(("target", "arch"), [("reference", "generic"), *cpus(), ("simt", "sm_90")], ids=str)
def test_every_border_of_rounding_is_respected(target: str, arch: str) -> None:
    """Rows of zeros minus gradients, at a learning rate of 1, are the gradients' negatives, rounded once."""
    numbers = {form.name: borders(form, MANY if target == "simt" else None) for form in NARROW}
    spec = spec_of(numbers)
    kernel = kernel_for("backward", target, arch, spec)
    tables, sections = [], []
    for layout in kernel.plan.layout.tables:
        tables.append(allocate(layout, torch.device("cpu")))
        as_indexable(tables[-1]).zero_()
        sections.append(allocate_section(layout, torch.device("cpu")))
    sequence = -torch.cat([rows.flatten() for rows in numbers.values()])
    gradients = Gradients(torch.empty(1, 0), sequence, None, None)
    hyper, counters = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0, 1])
    metadata = update_metadata_of(tables, sections, [True] * len(tables), "error")
    kernel(metadata, tables, sections, batch_of_all_rows(spec), gradients, hyper, counters, "error")
    for form, rows, table in zip(NARROW, numbers.values(), tables, strict=True):
        wanted = rows.clamp(-form.largest, form.largest).to(torch_dtype(form.name))
        wrong = (bits_of(table, form) != bits_of(wanted, form)).nonzero()
        assert not len(wrong), (form.name, [float(rows[tuple(at)]) for at in wrong[:9]])


def test_new_formats_follow_from_their_facts() -> None:
    """An invented format: 6 bits of exponent and one of fraction, without infinities."""
    form = replace(FLOATS["fp8_e4m3"], name="e6m1", exponent_bits=6, mantissa_bits=1, infinity=None, nan=0x7F)
    assert (form.bias, form.largest, form.smallest, form.largest_code) == (31, 2.0**32, 2.0**-31, 0x7E)
    assert form.overflow == form.largest_code and form.least_bound == 2.0**-30
