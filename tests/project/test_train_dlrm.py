"""The training example learns, writes what it promises, and trains the same model on one rank and on two; the code of
docs/sharding.md runs unchanged and sends the bytes that the page counts by hand."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support.sharded.ranks import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # torchrun does the same for a script

import train_dlrm  # noqa: E402

TINY = """--plan row_wise --steps 8 --eval-every 5 --batch-size 512 --eval-batches 2 --dim 4 --max-rows 40 --lr 0.05
--dense-lr 0.01"""


def train(rank: int, size: int, words: list[str]) -> list[dict[str, Any]]:
    return train_dlrm.run(train_dlrm.arguments([*TINY.split(), *words]), torch.device("cpu"))


def test_two_ranks_train_as_one_and_learn(tmp_path: Path) -> None:
    alone = train(0, 1, ["--out", str(tmp_path / "one")])
    both = run_ranks(2, train, ["--prefetch", "--out", str(tmp_path / "two")])
    written = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert written == both[0]
    assert [record["step"] for record in alone] == [0, 5, 8]
    for one, *of_ranks in zip(alone, *both, strict=True):
        for two in of_ranks:
            assert two.keys() == one.keys()
            for name in ("loss", "eval_loss", "auc"):
                if name in one:
                    assert math.isclose(one[name], two[name], rel_tol=1e-3), (name, one, two)
    assert abs(alone[0]["auc"] - 0.5) < 0.1 and alone[-1]["auc"] > 0.65
    assert alone[-1]["eval_loss"] < alone[0]["eval_loss"]
    assert alone[-1]["bytes_per_step"] == {}
    sent = both[0][-1]["bytes_per_step"]
    assert set(sent) == {"header", "ids", "vectors", "gradients"}
    every = 2 * 256 * 26 * 4 * 4  # ranks, samples, tables, columns, bytes
    assert sent["gradients"] == every
    assert 0 < sent["vectors"] < every / 8  # tables of 40 rows at most: few of 256 pools are different
    ElementTree.parse(tmp_path / "two/curves.svg")


@pytest.mark.soak
def test_the_code_of_the_sharding_page_runs_and_sends_the_bytes_that_it_counts(tmp_path: Path) -> None:
    page = (ROOT / "docs/sharding.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    end = "if dist.is_initialized():\n    dist.destroy_process_group()\n"
    assert end in first
    printed = re.findall(r"^rank \d sent to others: .*$", page, re.MULTILINE)
    assert len(printed) == 2
    script = tmp_path / "page.py"
    script.write_text("\n".join([first.replace(end, ""), *others, end, "print('done')"]), encoding="utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    out = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True).stdout
    assert out.count("done") == 2
    assert all(line in out for line in printed)
