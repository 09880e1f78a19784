"""Tensor parallelism through vLLM's own engine, on the CPU: several ranks answer what one reference says."""

import os
import subprocess
import tempfile

import pytest
from serving import (
    ENVIRONMENT,
    LOGPROB_BOUNDS,
    PROMPTS,
    START_SECONDS,
    command,
    compare,
    free_port,
    greedy,
    one_thread,  # noqa: F401 - a fixture
    reference_model,
    server,
)

from toy import ROTATED, write_toy

pytestmark = pytest.mark.serve


def test_three_ranks_answer_as_the_float64_reference(tmp_path):
    """Every linear is cut: q, k, v and gate, up by outputs, o and down by inputs, each rank with its own share of the maps."""
    folder = write_toy(tmp_path / "toy", hidden=192, intermediate=384, heads=3, kv_heads=3, vocab=384, seed=2, rotated=ROTATED)
    model = reference_model(folder, "3.0")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with server(folder, tmp_path / "log", "--enforce-eager", "--tensor-parallel-size", "3") as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["graded"])


def test_a_size_that_cuts_tiles_is_refused_with_the_legal_ones(tmp_path):
    folder = write_toy(tmp_path / "toy", hidden=128, intermediate=192, heads=2, kv_heads=2)
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch:
        ended = subprocess.run(
            command(folder, free_port(), "--enforce-eager", "--tensor-parallel-size", "2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"TMPDIR": scratch},
            text=True,
            timeout=START_SECONDS,
        )
    assert ended.returncode != 0
    assert "model.layers.0.mlp.gate_up_proj: with tensor parallel size 2" in ended.stdout, ended.stdout[-6000:]
    assert "Legal tensor parallel sizes for this layer: [1, 3]" in ended.stdout
