"""`tilequant bench` with the real `vllm` command: a small checkpoint beside its dense form."""

import json

import pytest
from serving import ENVIRONMENT

from toy import write_toy
from vllm_tilequant.checkpoint.convert import to_dense

pytestmark = pytest.mark.serve


@pytest.mark.timeout(900)
def test_ttft_tpot_and_memory_of_both_models(tmp_path, tilequant, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    toy = write_toy(tmp_path / "toy")  # a Llama: with Qwen's class the toy's tokenizer reads nothing back that it has written
    to_dense(toy, tmp_path / "dense")
    arguments = (
        "bench",
        toy,
        tmp_path / "out",
        "--reference",
        tmp_path / "dense",
        "--prompt",
        16,
        "--answer",
        4,
        "--requests",
        2,
    )
    code, said, err = tilequant(*arguments, "--warmups", 1, "--no-plot", "--json", "--", "--enforce-eager", "--max-num-seqs", 4)
    assert code == 0, err
    rows = json.loads(said)["rows"]
    assert [(r["method"], r["profile"]) for r in rows] == [("bf16", None), ("tilequant", "3.0")]
    for row in rows:
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and row["requests"] == 2
        assert 0.1 < row["resident_gib"] <= row["peak_gib"] < 16 and row["load_s"] > 1
    assert "tilequant: profile 3.0" in (tmp_path / "out" / "tilequant-3.0.log").read_text()
