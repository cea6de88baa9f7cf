"""Tables without a fused optimizer, replicated by DistributedDataParallel or sharded by FSDP2 over gloo."""

from __future__ import annotations

from support.sharded import ddp_ranks as work
from support.sharded.ranks import run_ranks


def test_replicas_train_as_one_process() -> None:
    (first, first_sharded), (second, second_sharded) = run_ranks(2, work.everything)
    for (sparse, options), one, other in zip(work.CASES, first, second, strict=True):
        assert one.same and other.same, (sparse, options)
        assert one.sparse == other.sparse == [sparse is True, sparse is not False]
        assert one.rows == other.rows
    assert first_sharded and second_sharded
