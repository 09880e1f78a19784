"""The scripts of `benchmarks/` around parallel serving: legal sizes of common models, the tables of docs/parallel.md."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OURS = ("legal_sizes", "parallel_tables", "parallel_kl", "synthetic", "report", "shapes")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in OURS:
        sys.modules.pop(name, None)


def test_the_document_shows_the_committed_figures(script):
    tables = script("parallel_tables")
    text = tables.DOCUMENT.read_text()
    assert tables.updated(text) == text, "run python benchmarks/parallel_tables.py"


def test_legal_sizes_of_common_models(script):
    """Against the shares of a rank, written out: whole heads, and whole tiles of every linear."""
    models = script("legal_sizes").MODELS
    assert len({m.name for m in models}) == len(models) > 30
    for m in models:
        wanted = [
            size
            for size in range(1, 65)
            if m.heads % size == 0
            and (m.kv_heads % size == 0 or size % m.kv_heads == 0)
            and m.heads // size * m.head % 64 == 0
            and max(m.kv_heads // size, 1) * m.head % 64 == 0
            and m.intermediate % size == 0
            and m.intermediate // size % 64 == 0
        ]
        assert m.legality(1).legal == wanted, m.name


def test_a_synthetic_checkpoint_is_one(script, tmp_path):
    """What the benchmark of two GPUs serves: a sound folder whose thresholds ask for the bits they are named after."""
    from vllm_tilequant.checkpoint.verify import verify
    from vllm_tilequant.kernels import reference

    synthetic, sizes = script("synthetic"), script("legal_sizes")
    shape = sizes.Shape("tiny", 256, 512, 4, 2, 64)
    folder = synthetic.write_tilequant(tmp_path / "toy", shape, 2, 512, 128, "cpu")
    verify(folder)
    g = torch.Generator().manual_seed(1)
    for group in synthetic.GROUPS:
        rows = synthetic.thresholds(group, 128, torch.Generator().manual_seed(0))
        x = synthetic.inputs_of(group, 128, g)[None]
        for profile, row in zip(synthetic.PROFILES, rows, strict=True):
            levels = reference.levels_ref(x, row)
            # 60 % of the tiles have 4 bits, which are all that a higher level reads there
            bits = 0.6 * levels.clamp_max(4).double().mean() + 0.4 * levels.double().mean()
            assert abs(float(bits) - float(profile)) < 0.15, (group, profile)


def test_engines_are_described_and_read_back(script):
    kl = script("parallel_kl")
    first = kl.parsed("tp=1,dtype=float32", kl.DEFAULTS)
    assert kl.described(first) == "tp=1,dtype=float32"
    assert kl.described(kl.parsed("tp=3", first), first) == "tp=3" and kl.parsed("tp=3", first)["dtype"] == "float32"
    with pytest.raises(ValueError, match=r"unknown keys \['pp'\]"):
        kl.parsed("pp=2", first)


def test_chunks_of_logits_are_joined(script, tmp_path):
    kl = script("parallel_kl")
    whole = torch.randn(14, 5)
    for i, part in enumerate(whole.split([4, 3, 4, 3])):
        torch.save(part, tmp_path / f"{i:06d}.pt")
    assert torch.equal(torch.cat(list(kl.logits(tmp_path, 7))), whole) and len(list(kl.logits(tmp_path, 7))) == 2
