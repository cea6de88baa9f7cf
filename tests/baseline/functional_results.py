"""What the functions of `ef.functional` compute on the CPU."""

from __future__ import annotations

import torch

import embforge as ef
from baseline.digests import Digests, digests_of
from baseline.drawing import Numbers


def functional_results() -> Digests:
    """Rows and their gradients, with padding, scales per token and narrow formats; bags of every mode."""
    numbers = Numbers(3)
    ids, rows = numbers.whole(60, 30).reshape(12, 5), numbers.real(30, 9)
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        weight = rows.to(dtype)
        name = str(dtype).removeprefix("torch.")
        found.append({f"rows of {name}": ef.functional.embedding(ids, weight)})
    weight = rows.clone().requires_grad_()
    result = ef.functional.embedding(ids, weight, padding=4)
    result.backward(numbers.real(*result.shape))  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    found.append({"padded rows": result, "gradient of padded rows": weight.grad})
    factors = numbers.real(12 * 5)
    for mode in ("sum", "mean", "max"):
        weight = rows.clone().requires_grad_()
        weights = factors.clone() if mode == "sum" else None
        offsets = torch.tensor([0, 7, 7, 20, 60 - 1])
        result = ef.functional.embedding_bag(
            ids.reshape(-1), weight, offsets, mode=mode, per_sample_weights=weights, padding_idx=2
        )
        result.backward(numbers.real(*result.shape))  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        gradient = weight.grad.coalesce().to_dense() if weight.grad.is_sparse else weight.grad
        found.append({f"bags by {mode}": result, f"gradient of bags by {mode}": gradient})
    return digests_of(found)
