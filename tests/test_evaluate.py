"""The quality numbers: exact where they must be, ordered where they can only be ordered."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="evaluation needs the calibration environment")

from toy import write_toy
from vllm_tilequant import evaluate as ev
from vllm_tilequant import hf
from vllm_tilequant.checkpoint.reader import Checkpoint

FIELDS = {
    *("name", "model", "recipe", "map", "profile", "phase", "activation", "stored_bits", "loaded_bits"),
    *("kl_milli", "kl_se", "kl_p99", "top1", "ppl", "ppl_reference", "level_shares", "tokens", "window", "dtype", "device"),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder, dense model of the same weights, token windows)."""
    folder = write_toy(tmp_path_factory.mktemp("toy") / "toy")
    ids = torch.randint(3, 256, (6, 64), generator=torch.Generator().manual_seed(0))
    return folder, hf.load_dense(folder), ids


def run(toy, profiles=("all",), activations=("none",), phases=ev.PHASES, **options):
    folder, dense, ids = toy
    rows = ev.configurations(Checkpoint.open(folder).schema, profiles, activations, phases)
    return ev.evaluate(folder, dense, ids, rows, **options)


def test_identical_models_have_no_divergence(toy):
    rows = run(toy, ["full"], phases=["static"])
    (row,) = rows
    assert set(row) >= FIELDS
    assert (row["kl_milli"], row["kl_se"], row["kl_p99"], row["top1"]) == (0, 0, 0, 1)
    assert row["ppl"] == row["ppl_reference"]
    assert row["loaded_bits"] == pytest.approx(Checkpoint.open(toy[0]).stored_code_bits(), abs=1e-12)
    assert row["stored_bits"] == Checkpoint.open(toy[0]).stored_bits()
    assert (row["phase"], row["profile"], row["activation"], row["tokens"]) == ("static", "off", "none", 384)
    assert row["map"] == "4: 50.0%, 8: 50.0%"


def test_more_bits_are_nearer_to_the_reference(toy):
    rows = run(toy, phases=["graded"])
    assert [r["profile"] for r in rows] == ["2.0", "3.0", "4.0", "full"]
    kl, bits = ([r[k] for r in rows] for k in ("kl_milli", "loaded_bits"))
    assert kl == sorted(kl, reverse=True)
    assert bits == sorted(bits)
    assert kl[0] > 100 and kl[-1] < 1e-6 and rows[-1]["top1"] == 1
    for row in rows:
        assert sum(row["level_shares"].values()) == pytest.approx(1)
    assert rows[-1]["level_shares"]["8"] == 1


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_the_batch_changes_nothing(toy, batch):
    """Up to the order of float32 sums in the matrix products, which differs between batch shapes."""
    wanted = run(toy, ["3.0"], ["group64"], batch=2)
    for got, want in zip(run(toy, ["3.0"], ["group64"], batch=batch), wanted, strict=True):
        for key in ("kl_milli", "kl_se", "kl_p99", "ppl", "loaded_bits"):
            # a channel next to its threshold, or a value between two INT8 codes, may go either way
            assert got[key] == pytest.approx(want[key], rel=2e-2), key


def test_statistics_are_those_of_plain_torch(toy, monkeypatch):
    folder, dense, ids = toy
    monkeypatch.setattr(ev, "CHUNK_ROWS", 100)  # not a divisor of the number of rows
    (row,) = ev.evaluate(folder, dense, ids, [ev.Configuration("2.0", "graded", "none")], batch=6)
    model = hf.load_reference(folder, profile="2.0", activation="none", graded="always")
    p, q = (F.log_softmax(m(ids).logits.double(), -1) for m in (dense, model))
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    assert row["kl_milli"] == pytest.approx(1e3 * float(kl.mean()), rel=1e-5)
    assert row["kl_se"] == pytest.approx(1e3 * float(kl.std()) / math.sqrt(kl.numel()), rel=1e-5)
    assert row["kl_p99"] == pytest.approx(1e3 * float(kl.sort().values[math.ceil(0.99 * kl.numel()) - 1]), rel=1e-5)
    assert row["top1"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    nll = -q[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    assert math.log(row["ppl"]) == pytest.approx(float(nll), rel=1e-6)


def test_what_a_row_adds_is_taken_position_by_position(toy):
    folder, dense, ids = toy
    rows = [ev.Configuration("off", "static", a) for a in ("group64", "none", "token_smooth")]
    got = ev.evaluate(folder, dense, ids, rows, batch=6)
    assert (got[1]["kl_over_static"], got[1]["kl_over_static_se"]) == (0, 0)
    for row in (got[0], got[2]):
        assert row["kl_over_static"] == pytest.approx(row["kl_milli"] - got[1]["kl_milli"], abs=1e-9)
        assert row["kl_over_static_se"] > 0
    (alone,) = ev.evaluate(folder, dense, ids, rows[:1], batch=6)
    assert alone["kl_over_static"] is None and alone["kl_over_static_se"] is None


def test_progress_counts_every_step(toy):
    calls = []
    run(toy, ["3.0"], batch=4, progress=lambda done, total, seconds: calls.append((done, total)))
    assert calls == [(i, 4) for i in range(1, 5)]


def test_static_rows_do_not_multiply_with_profiles(toy):
    schema = Checkpoint.open(toy[0]).schema
    rows = ev.configurations(schema, ["2.0", "off"], ["none", "group64"], ev.PHASES)
    assert [(r.phase, r.profile, r.activation) for r in rows] == [
        ("static", "off", "none"),
        ("static", "off", "group64"),
        ("graded", "2.0", "none"),
        ("graded", "2.0", "group64"),
    ]
    for profiles, activations, phases, error in (
        (["7"], ["none"], ["graded"], "unknown profile '7'"),
        (["2.0"], ["int3"], ["graded"], "activation is 'int3'"),
        (["2.0"], ["none"], ["decode"], "phase is 'decode'"),
        (["off"], ["none"], ["graded"], "nothing to evaluate"),
    ):
        with pytest.raises(ValueError, match=error):
            ev.configurations(schema, profiles, activations, phases)


def test_windows_take_the_text_from_its_start(toy, tmp_path):
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{3 + i % 200}" for i in range(100)))
    assert torch.equal(ev.windows(toy[0], text, 70, 32), 3 + torch.arange(64).view(2, 32))
    assert ev.windows(toy[0], text, 10**6, 32).shape == (3, 32)
    with pytest.raises(ValueError, match="has 100 tokens, fewer than one window of 128"):
        ev.windows(toy[0], text, 256, 128)
    with pytest.raises(ValueError, match="wanted tokens >= window"):
        ev.windows(toy[0], text, 16, 32)


def test_another_vocabulary_is_refused(toy, tmp_path):
    folder, _, ids = toy
    other = hf.load_dense(write_toy(tmp_path / "other", vocab=320))
    with pytest.raises(ValueError, match=r"the reference's logits are \[6, 64, 320\], the checkpoint's \[6, 64, 256\]"):
        ev.evaluate(folder, other, ids, [ev.Configuration("off", "static", "none")], batch=6)
