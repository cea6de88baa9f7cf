"""`functional.embedding` and `VocabParallelEmbedding` give on 1, 2, 3 and 4 ranks what one rank gives.

All ranks of all groups are the same four processes (`tests/support/sharded/vocab_ranks.py`): starting them is most of
the time.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sharded import vocab_ranks

import embforge as ef
from embforge.sharded import vocab_parallel


def test_all_checks_pass_on_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["embforge.sharded.vocab_parallel"])  # imported once for all ranks
    mp.start_processes(vocab_ranks.run, args=(str(tmp_path),), nprocs=vocab_ranks.MOST_RANKS, start_method="forkserver")


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 120), st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(1, 900)
)
def test_rows_drawn_in_blocks_are_those_of_one_draw(rows: int, dim: int, dtype: str, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_parallel, "DRAWN_ELEMENTS", at_once)
        torch.manual_seed(3)
        module = ef.sharded.VocabParallelEmbedding(rows, dim, dtype=getattr(torch, dtype))
    torch.manual_seed(3)
    one = torch.nn.Embedding(rows, dim, dtype=getattr(torch, dtype))
    assert torch.equal(module.weight, one.weight)


def test_one_process_needs_no_group() -> None:
    module = ef.sharded.VocabParallelEmbedding(5, 8)
    assert torch.equal(module(torch.tensor([4, 5])), torch.stack([module.weight[4], torch.zeros(8)]))
    assert torch.equal(module.full(), module.weight) and "rank" not in repr(module)
    assert ef.sharded.VocabParallelEmbedding(5, 8, device="meta").weight.is_meta


def test_wrong_arguments_of_the_module_are_refused() -> None:
    for message, arguments in (
        ("num_embeddings=0", {"num_embeddings": 0}),
        ("embedding_dim=2.0", {"embedding_dim": 2.0}),
        ("padding_idx=5 is not a row; allowed: -5 to 4", {"padding_idx": 5}),
        ("sharding_dim=2", {"sharding_dim": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            ef.sharded.VocabParallelEmbedding(**({"num_embeddings": 5, "embedding_dim": 8} | arguments))
    with pytest.raises(RuntimeError, match=r"process_group: torch.distributed is not initialised"):
        ef.sharded.VocabParallelEmbedding(5, 8, process_group=[0, 1])
