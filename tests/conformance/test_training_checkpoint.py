"""Training under torch.utils.checkpoint: a forward that is repeated reads the same rows, or is refused."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from conformance.backends import device_of
from conformance.training import ONE, differing, draw, snapshot, steps, trained, trained_backend
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embforge.collection import EmbeddingCollection

reentrant = pytest.mark.parametrize("reentrant", [True, False])


def segment(module: EmbeddingCollection, batch: Any, scale: Tensor, reentrant: bool | None) -> Tensor:
    """A part of a model whose forward is repeated in the backward, or not if `reentrant` is None."""

    def run(scale: Tensor) -> Tensor:
        return (module(*batch) * scale).pow(2)

    if reentrant is None:
        return run(scale)
    found: Tensor = checkpoint(run, scale, use_reentrant=reentrant)
    return found


@trained_backend
@reentrant
def test_one_checkpointed_call_is_right(backend: Any, reentrant: bool) -> None:
    module, twin = trained(backend), trained(backend)
    scales = [torch.ones(1, device=device_of(backend), requires_grad=True) for _ in range(2)]
    for seed in range(2):
        segment(module, draw(backend, seed), scales[0], reentrant).sum().backward()
        segment(twin, draw(backend, seed), scales[1], None).sum().backward()
    assert torch.equal(scales[0].grad, scales[1].grad)  # type: ignore[arg-type]
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []


@reentrant
@pytest.mark.parametrize("seeds", [(0, 1), (0, 0)])
def test_two_checkpointed_calls_are_refused(reentrant: bool, seeds: tuple[int, int]) -> None:
    module, scale = trained(), torch.ones(1, requires_grad=True)
    one, other = (segment(module, draw(seed=seed), scale, reentrant) for seed in seeds)
    with pytest.raises(RuntimeError, match=r"a recomputed forward \(torch.utils.checkpoint\) would read rows"):
        (one + other).sum().backward()
    assert steps(module) == 1


@reentrant
def test_two_checkpointed_calls_that_accumulate_are_right(reentrant: bool) -> None:
    module, twin = trained(accumulate=True), trained(accumulate=True)
    scales = [torch.ones(1, requires_grad=True) for _ in range(2)]
    for each, scale, how in ((module, scales[0], reentrant), (twin, scales[1], None)):
        (segment(each, draw(), scale, how) + segment(each, draw(seed=1), scale, how)).sum().backward()
        each.step()
    assert torch.equal(scales[0].grad, scales[1].grad)  # type: ignore[arg-type]
    assert steps(module) == 1 and differing(snapshot(module), snapshot(twin)) == []


@reentrant
def test_a_checkpointed_call_that_waits_for_its_backward_too_long(reentrant: bool) -> None:
    """Another backward pass changes rows, and an unrelated forward reads them."""
    module, scale = trained(), torch.ones(1, requires_grad=True)
    batch, other = draw(), draw(seed=1)
    waiting = segment(module, batch, scale, reentrant)
    module(*other).sum().backward()
    module(*other)
    with torch.no_grad():
        for _ in range(300):
            module(batch[0][:0], torch.zeros(1, dtype=torch.int64), batch[2][:0])
    with pytest.raises(RuntimeError, match="would read rows"):
        waiting.sum().backward()
    assert steps(module) == 1


@reentrant
@pytest.mark.parametrize("between", ["read", "same ids", "nothing"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_repeated_forward_is_known_by_its_time(reentrant: bool, between: str, inside: bool, first: bool) -> None:
    """It is not recognised by its ids: other calls may use the same, and the checkpointed function may make them."""
    module, scale = trained(spec=ONE), torch.ones(1, requires_grad=True)
    values, offsets = torch.arange(9), torch.tensor([0, 4, 9])
    before = module(values, offsets).sum()

    def run(scale: Tensor) -> Tensor:
        return (module(values + 0 if inside else values, offsets) * scale).pow(2)

    waiting = checkpoint(run, scale, use_reentrant=reentrant)
    (before if first else module(values, offsets).sum()).backward()
    if between == "same ids":
        module(values, offsets).sum()
    elif between == "read":
        with torch.no_grad():
            module(values, offsets)
    with pytest.raises(RuntimeError, match="would read rows"):
        waiting.sum().backward()
    assert steps(module) == 1 and scale.grad is None


@reentrant
def test_checkpoints_step_after_step(reentrant: bool) -> None:
    """Also with reads in between, with the dense part first, and with a checkpoint in a checkpoint. A retained graph is
    refused."""
    module, scale = trained(), torch.ones(1, requires_grad=True)
    for step in range(3):
        with torch.no_grad():
            module(*draw())
        checkpoint(lambda x: x.sin() * module(*draw()), scale, use_reentrant=reentrant).sum().backward()
        outer = checkpoint(lambda x: segment(module, draw(), x, reentrant) * 2, scale, use_reentrant=reentrant)
        outer.sum().backward(retain_graph=step == 2)
    with pytest.raises(RuntimeError, match="would read rows"):
        outer.sum().backward()
    assert steps(module) == 6


@reentrant
def test_a_checkpoint_in_a_checkpoint_that_waits_too_long(reentrant: bool) -> None:
    module, scale = trained(), torch.ones(1, requires_grad=True)
    outer = checkpoint(lambda x: segment(module, draw(), x, reentrant) * 2, scale, use_reentrant=reentrant)
    module(*draw()).sum().backward()
    with torch.no_grad():
        module(*draw())
    with pytest.raises(RuntimeError, match="would read rows"):
        outer.sum().backward()


@reentrant
def test_checkpoints_where_several_threads_call(reentrant: bool) -> None:
    """Autograd's sequence numbers of two threads cannot be compared, so that it is refused once rows have changed."""
    module, scale = trained(), torch.ones(1, requires_grad=True)
    other = Thread(target=lambda: module(*draw()))
    other.start()
    other.join()
    segment(module, draw(), scale, reentrant).sum().backward()
    waiting = segment(module, draw(), scale, reentrant)
    with pytest.raises(RuntimeError, match="several threads"):
        waiting.sum().backward()


def test_reads_in_a_backward_pass_are_no_repeated_forward() -> None:
    module, seen = trained(), []

    def read(_: Tensor) -> None:
        with torch.no_grad():
            seen.append(module(*draw()))

    one, other = module(*draw()), module(*draw())
    for each in (one, other):
        each.register_hook(read)
    (one + other).sum().backward()
    assert steps(module) == 2 and len(seen) == 2 and not torch.equal(*seen)


def test_checkpoints_in_compiled_graphs() -> None:
    """In one graph the order is known, and rows are read before they change. Between two graphs it is refused."""
    torch.compiler.reset()

    def both(module: EmbeddingCollection, batch: Any, scale: Tensor, reentrant: bool | None) -> Tensor:
        return segment(module, batch, scale, reentrant) + segment(module, batch, scale, reentrant)

    module, twin = trained(), trained()
    scales = [torch.ones(1, requires_grad=True) for _ in range(2)]
    torch.compile(both, backend="aot_eager", fullgraph=True)(module, draw(), scales[0], False).sum().backward()
    both(twin, draw(), scales[1], None).sum().backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad)
    assert steps(module) == 2 and differing(snapshot(module), snapshot(twin)) == []

    compiled = torch.compile(segment, backend="aot_eager", fullgraph=True)
    loss = compiled(module, draw(), scales[0], False) + compiled(module, draw(), scales[0], False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    assert steps(module) == 3


@reentrant
def test_a_checkpoint_around_a_compiled_module(reentrant: bool) -> None:
    """One call per step is right. A call that would read updated rows is refused, as without a compiler."""
    torch.compiler.reset()
    module, twin = trained(), trained()
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    scales = [torch.ones(1, requires_grad=True) for _ in range(2)]
    for seed in range(3):
        segment(compiled, draw(seed=seed), scales[0], reentrant).sum().backward()
        segment(twin, draw(seed=seed), scales[1], None).sum().backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad)
    assert steps(module) == 3 and differing(snapshot(module), snapshot(twin)) == []

    refused = pytest.raises(RuntimeError, match=r"a recomputed forward \(torch.utils.checkpoint\) would read rows")
    one, other = (segment(compiled, draw(seed=seed), scales[0], reentrant) for seed in range(2))
    with refused:
        (one + other).sum().backward()
    waits = segment(compiled, draw(), scales[0], reentrant)
    compiled(*draw()).sum().backward()
    with refused:
        waits.sum().backward()
    assert steps(module) == 5
    segment(compiled, draw(), scales[0], reentrant).sum().backward()
    assert steps(module) == 6
