"""What only a GPU can show of a server: graphs over reloaded weights, sleeping and waking, no compiler after the start.

Four engines, one after the other in one process (engines.py); some four minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from serving import ENVIRONMENT, PARALLEL_TOY, PROMPTS

from toy import write_other, write_toy

pytestmark = [pytest.mark.serve, pytest.mark.gpu]

OPTIONS = dict(dtype="bfloat16", enforce_eager=False, max_model_len=2048, max_num_seqs=64, kv_cache_memory_bytes=2**30)
OPTIONS |= dict(gpu_memory_utilization=0.5)
BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 23, 31, 32, 33, 47, 48, 63, 64]
STEPS = ["ask", "compiled", "every batch", "compiled", "ask", "sleep 1", "ask", "sleep 2", "ask", "save", "reload other", "ask"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = write_toy(tmp_path_factory.mktemp("gpu") / "toy", **PARALLEL_TOY, head=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": OPTIONS["max_model_len"]}))
    other = write_other(folder, folder.with_name("other"))
    state = shutil.copytree(folder, folder.with_name("state"), ignore=shutil.ignore_patterns("*.safetensors"))
    drafts = {"speculative_config": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}}
    jobs = {
        "first": dict(folder=str(folder), other=str(other), steps=STEPS, batches=BATCHES, long=1500, save=str(state))
        | dict(options=OPTIONS | {"enable_sleep_mode": True}),
        "other": dict(folder=str(other), options=OPTIONS),
        "restored": dict(folder=str(state), options=OPTIONS | {"load_format": "sharded_state"}),
        "draft": dict(folder=str(folder), options=OPTIONS | drafts),
    }
    asked, answered, log = (folder.with_name(name) for name in ("jobs.json", "results.json", "log"))
    asked.write_text(json.dumps({name: {"prompts": PROMPTS, "new": 24} | job for name, job in jobs.items()}))
    script = Path(__file__).with_name("engines.py")
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, str(script), str(asked), str(answered)],
            stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, timeout=550,
        )  # fmt: skip
    found = json.loads(answered.read_text()) if answered.exists() else {}
    assert set(found) == set(jobs), log.read_text()[-6000:]
    return found


def tokens(results, name):
    assert "error" not in results[name], results[name]["error"]
    return [asked["tokens"] for asked in results[name]["asked"]]


def test_no_kernel_is_compiled_after_the_start(results):
    """Steps of 1 to 64 rows, a prompt of 1500 tokens, and mixed batches on the way."""
    assert "error" not in results["first"], results["first"]["error"]
    before, after = results["first"]["compiled"]
    assert sum(before.values()) > 0 and after == before


@pytest.mark.parametrize("asked, what", [(1, "other batches"), (2, "sleep at level 1"), (3, "sleep at level 2 and a reload")])
def test_the_text_outlives(results, asked, what):
    texts = tokens(results, "first")
    assert texts[asked] == texts[0], what


def test_captured_graphs_read_reloaded_weights(results):
    first, other = tokens(results, "first"), tokens(results, "other")
    assert first[-1] == other[0] != first[0]


def test_a_sharded_state_is_what_was_saved(results):
    """Saved after sleeping and waking, by kernels' arrangement; prepared anew by another engine."""
    assert tokens(results, "restored")[0] == tokens(results, "first")[0]


def test_a_quantized_draft_is_accepted(results):
    """Of itself every draft is right but where bf16 differs between batch shapes."""
    got = tokens(results, "draft")[0]
    assert all(len(text) == 24 for text in got)
    metrics = results["draft"]["metrics"]
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    print(f"{accepted} of {drafted} drafted tokens accepted on {torch.cuda.get_device_name()}")
    assert accepted >= 0.5 * drafted > 0


def test_a_large_tensor_reaches_the_gpu_by_pinned_memory(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    from vllm_tilequant.parameters import _STAGED, _staged

    words = torch.randint(-(2**31), 2**31 - 1, (2 * _STAGED // 4,), dtype=torch.int32)
    save_file({"large": words, "small": words[:64].clone()}, tmp_path / "planes.safetensors")
    with safe_open(tmp_path / "planes.safetensors", "pt") as stored:
        large, small = stored.get_tensor("large"), stored.get_tensor("small")
    device = torch.device("cuda")
    staged = _staged(large, device)
    assert staged.is_cuda and torch.equal(staged.cpu(), words)
    assert _staged(small, device) is small and _staged(large, torch.device("cpu")) is large
