"""The CUDA launcher against a machine that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.signature import MISTAKES, STATUS_WORDS, arguments_of
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda_launch import launch_of, scratch_width, shape_of
from embforge.inputs import Batch
from embforge.launch import cuda
from embforge.launch.metadata import metadata_of

core = pytest.importorskip("cuda.core")


@dataclass
class Launch:
    symbol: str
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    arguments: tuple[Any, ...]
    counter: int | None
    """The first word of the queue at that moment."""


@dataclass
class FakeGpu:
    """CPU memory, one stream, and messages that arrive when the test says so."""

    version: tuple[int, int] = (13, 4)
    handle: int = 0x5EED
    in_capture: bool = False
    delivered: int = 0
    """How many of the messages sent have arrived."""
    waited: int = 0
    current: list[torch.device] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)

    def driver_version(self) -> tuple[int, int]:
        return self.version

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.current.append(device)
        try:
            yield
        finally:
            self.current.pop()

    def stream(self, device: torch.device) -> int:
        assert self.current == [device]
        return self.handle

    def capturing(self) -> bool:
        return self.in_capture

    def send(self, words: Tensor) -> Any:
        gpu, number, then = self, len(self.sent), words.clone()
        self.sent.append(words)

        class Message:
            def arrived(self) -> bool:
                return number < gpu.delivered

            def words(self) -> list[int]:
                return list(then.tolist())

        return Message()

    def wait(self, device: torch.device) -> None:
        assert self.current == [device]
        self.waited += 1


class FakeCode:
    def __init__(self, cubin: bytes, name: str) -> None:
        self.cubin, self.name, self.asked = cubin, name, []  # type: ignore[var-annotated]

    def get_kernel(self, symbol: str) -> str:
        self.asked.append(symbol)
        return symbol


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """cuda.core, with the calls that need a driver written down instead."""
    done: list[Launch] = []

    class Code:
        @staticmethod
        def from_cubin(cubin: bytes, *, name: str = "") -> FakeCode:
            return FakeCode(cubin, name)

    class Stream:
        @staticmethod
        def from_handle(handle: int) -> int:
            return handle

    def launch(stream: int, config: Any, kernel: str, *arguments: Any) -> None:
        queue = arguments[[a.name for a in arguments_of("cuda")].index("queue")]
        counter = ctypes.c_int64.from_address(queue).value if queue else None
        done.append(Launch(kernel, stream, config.grid, config.block, config.shmem_size, arguments, counter))

    monkeypatch.setattr(core, "ObjectCode", Code)
    monkeypatch.setattr(core, "Stream", Stream)
    monkeypatch.setattr(core, "launch", launch)
    return done


def spec() -> CollectionSpec:
    return CollectionSpec(
        (TableSpec("a", 100, 8), TableSpec("b", 50, 4, "fp16")),
        (
            FeatureSpec("x", "a"),
            FeatureSpec("y", "b", "mean", weighted=True),
            FeatureSpec("z", "b", "none"),
            FeatureSpec("c", "a", "concat", hotness=2),
        ),
        output_dtype="bf16",
        name="launch",
    )


def tables_of(plan: Plan) -> list[Tensor]:
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    return [torch.zeros(t.num_embeddings, t.embedding_dim, dtype=dtypes[t.dtype]) for t in plan.spec.tables]


def batch_of(lengths: list[int], weights: bool = True) -> Batch:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    count = int(offsets[-1])
    values = torch.zeros(count, dtype=torch.int64)
    return Batch(values, offsets, torch.ones(count) if weights else None, len(lengths) // 4, None)


@dataclass
class Call:
    forward: cuda.CudaForward
    gpu: FakeGpu
    tables: list[Tensor]

    def __call__(self, batch: Batch, elements: int = 0, mode: str = "error") -> tuple[Tensor, Tensor | None]:
        return self.forward(metadata_of(self.tables, mode), self.tables, batch, elements, mode)


@pytest.fixture
def call(launches: list[Launch]) -> Call:
    plan = Plan("forward", "cuda", "sm_90", "int64", spec(), CudaParams())
    gpu = FakeGpu()
    return Call(cuda.CudaForward(plan, b"cubin", gpu), gpu, tables_of(plan))


def named(launch: Launch) -> dict[str, Any]:
    return dict(zip((a.name for a in arguments_of("cuda")), launch.arguments, strict=True))


def test_arguments_are_packed_in_the_signatures_order_and_width(call: Call, launches: list[Launch]) -> None:
    batch = batch_of([3, 1, 2, 2, 4, 0, 1, 2])
    pooled, sequence = call(batch, 4 * 16)
    (launch,) = launches
    plan = call.forward.plan
    assert sequence is not None
    assert pooled.shape == (2, plan.layout.output_width)
    assert pooled.dtype == sequence.dtype == torch.bfloat16
    assert sequence.shape == (64,)
    given = named(launch)
    for argument in arguments_of("cuda"):
        kind = int if argument.is_pointer else numpy.int64
        assert type(given[argument.name]) is kind, argument.name
    assert given["values"] == batch.values.data_ptr()
    assert given["offsets"] == batch.offsets.data_ptr()
    assert batch.weights is not None
    assert given["weights"] == batch.weights.data_ptr()
    assert given["pooled"] == pooled.data_ptr()
    assert given["sequence"] == sequence.data_ptr()
    assert (given["batch"], given["num_values"], given["sequence_size"]) == (2, 15, 64)
    assert given["status"] == call.gpu.sent[0].data_ptr()
    assert given["metadata"] != 0
    assert given["scratch"] == given["queue"] == 0


def test_grid_block_shared_memory_and_stream(call: Call, launches: list[Launch]) -> None:
    call(batch_of([1] * 4 * 100, weights=False), 100 * 16)
    (launch,) = launches
    plan = call.forward.plan
    assert launch.symbol == plan.uri
    assert launch.stream == call.gpu.handle
    assert launch.grid == (launch_of(shape_of(plan), 100, 400).kernels[0].grid, 1, 1)
    assert launch.block == (256, 1, 1)
    assert launch.shared == 0
    assert named(launch)["weights"] == 0
    assert call.gpu.current == []


def test_long_bags_get_buffers_and_their_kernels(call: Call, launches: list[Launch]) -> None:
    call(batch_of([9000, 0, 0, 0]), 0)
    plan = call.forward.plan
    assert [k.symbol for k in launches] == [plan.uri, f"{plan.uri}_long", f"{plan.uri}_merge"]
    work = launch_of(shape_of(plan), 1, 9000)
    assert work.scratch_floats % scratch_width(plan) == 0
    for launch in launches:
        assert named(launch) == named(launches[0])
    assert launches[0].counter == 0
    assert named(launches[0])["queue"] != 0
    assert named(launches[0])["scratch"] != 0


def test_an_empty_batch_launches_nothing(call: Call, launches: list[Launch]) -> None:
    pooled, sequence = call(batch_of([]), 0)
    assert pooled.shape == (0, call.forward.plan.layout.output_width)
    assert sequence is not None
    assert sequence.shape == (0,)
    assert launches == []
    with pytest.raises(ValueError, match="offsets: values has 3 ids"):
        call(Batch(torch.zeros(3, dtype=torch.int64), torch.tensor([0]), None, 0, None))


def test_kernels_are_looked_up_once(call: Call, launches: list[Launch]) -> None:
    for _ in range(3):
        call(batch_of([1, 1, 0, 1]))
    assert call.forward._code.asked == [call.forward.plan.uri]
    assert len(launches) == 3


def claim(status: Tensor, kind: str, **words: int) -> None:
    base = MISTAKES.index(kind) * len(STATUS_WORDS)
    for name, value in {"claimed": 1, **words}.items():
        status[base + STATUS_WORDS.index(name)] = value


def test_a_bad_id_is_raised_by_the_next_call_once_its_news_have_arrived(call: Call, launches: list[Launch]) -> None:
    batch = batch_of([1, 1, 0, 1])
    call(batch)
    status = call.gpu.sent[0]
    claim(status, "BAD_ID", feature=1, sample=0, position=2, value=77)
    call(batch)  # the copy is still under way: no error, and no waiting
    call.gpu.delivered = 1
    call(batch)  # it was made before the mistake: another is sent
    assert len(call.gpu.sent) == 2
    call.gpu.delivered = 2
    with pytest.raises(IndexError, match=r"feature 'y': id 77 of sample 0, position 2 .*table 'b'; allowed: 0 to 49"):
        call(batch)
    assert not status.any()
    call(batch)
    call.forward.check()
    assert len(launches) == 4
    assert call.gpu.waited == 1


def test_errors_reach_a_caller_that_is_always_ahead_of_the_gpu(call: Call, launches: list[Launch]) -> None:
    batch = batch_of([1, 1, 0, 1])
    call(batch)
    claim(call.gpu.sent[0], "BAD_ID", feature=1, sample=0, position=2, value=77)
    with pytest.raises(IndexError):
        for turn in range(20):  # each copy arrives a few calls after it was sent, when newer ones would be under way
            call.gpu.delivered = turn // 4
            call(batch)
    assert len(call.gpu.sent) < 5


def test_check_raises_at_once(call: Call, launches: list[Launch]) -> None:
    call.forward.check()
    call(batch_of([1, 1, 0, 1]))
    claim(call.gpu.sent[0], "LONG_CONCAT", feature=3, sample=0, position=2, value=5)
    with pytest.raises(ValueError, match=r"feature 'c': the bag of sample 0 has 5 ids, hotness=2"):
        call.forward.check()
    call.forward.check()


def test_bad_offsets_come_before_bad_ids(call: Call, launches: list[Launch]) -> None:
    call(batch_of([1, 1, 0, 1]))
    claim(call.gpu.sent[0], "BAD_ID", feature=1, sample=0, position=2, value=77)
    claim(call.gpu.sent[0], "BAD_OFFSET", feature=0, sample=0, position=1, value=-4)
    with pytest.raises(ValueError, match=r"offsets: offsets\[1\] is -4"):
        call.forward.check()


def test_in_zero_mode_a_bad_id_is_no_error_but_bad_offsets_are(call: Call, launches: list[Launch]) -> None:
    call(batch_of([1, 1, 0, 1]), mode="zero")
    claim(call.gpu.sent[0], "BAD_ID", feature=1, sample=0, position=2, value=77)
    call.forward.check()
    claim(call.gpu.sent[0], "BAD_OFFSET", feature=0, sample=0, position=1, value=-4)
    with pytest.raises(ValueError, match="offsets"):
        call.forward.check()


def test_modes_do_not_share_their_status(call: Call, launches: list[Launch]) -> None:
    call(batch_of([1, 1, 0, 1]), mode="zero")
    call(batch_of([1, 1, 0, 1]), mode="error")
    first, second = (named(launch)["status"] for launch in launches)
    assert first != second


def test_nothing_is_asked_of_the_device_during_capture(call: Call, launches: list[Launch]) -> None:
    call(batch_of([1, 1, 0, 1]))
    claim(call.gpu.sent[0], "BAD_ID", feature=1, sample=0, position=2, value=77)
    call.gpu.delivered, call.gpu.in_capture = 1, True
    call(batch_of([1, 1, 0, 1]))
    assert len(call.gpu.sent) == 1
    call.gpu.in_capture = False
    call(batch_of([1, 1, 0, 1]))
    call.gpu.delivered = 2
    with pytest.raises(IndexError):
        call(batch_of([1, 1, 0, 1]))


def test_a_first_call_inside_a_capture_is_refused(call: Call, launches: list[Launch]) -> None:
    call.gpu.in_capture = True
    with pytest.raises(RuntimeError, match="call the module once before capturing"):
        call(batch_of([1, 1, 0, 1]))
    call.gpu.in_capture = False
    call(batch_of([1, 1, 0, 1]))
    call.gpu.in_capture = True
    call(batch_of([1, 1, 0, 1]))
    with pytest.raises(RuntimeError, match="call the module once before capturing"):
        call(batch_of([9000, 0, 0, 0]))  # needs the kernels of long bags
    assert len(launches) == 2


def test_kernels_made_elsewhere_need_no_compiler(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "installed_nvrtc", lambda: None)
    plan = Plan("forward", "cuda", "sm_90", "int64", spec(), CudaParams())
    cuda.CudaForward(plan, b"cubin", FakeGpu(version=(12, 9)))


def test_batches_past_what_a_grid_holds_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_BLOCKS", 1)
    with pytest.raises(ValueError, match="split the batch"):
        call(batch_of([1] * 4 * 64))


def test_a_driver_older_than_the_compiler_is_refused(launches: list[Launch]) -> None:
    plan = Plan("forward", "cuda", "sm_90", "int64", spec(), CudaParams())
    with pytest.raises(ToolchainError, match=r"update the driver"):
        cuda.CudaForward(plan, b"cubin", FakeGpu(version=(12, 9)))
