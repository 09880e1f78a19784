"""The modifier inside llm-compressor's oneshot, and `tilequant quantize`, on a tiny Llama."""

import json
import shutil

import pytest
import torch
import yaml
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from tiny import hashes, write_model
from toy import write_tokenizer
from vllm_tilequant.calibrate.data import bundled_text, load_calibration
from vllm_tilequant.calibrate.modifier import TileQuantModifier
from vllm_tilequant.calibrate.run import quantize
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.hf import load_dense
from vllm_tilequant.schema import FormatError

pytestmark = pytest.mark.calibrate


@pytest.fixture(scope="module")
def quantized(model, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "tq"
    quantize(str(model), out, data=text, samples=4, length=64, seed=0)
    return out


def test_the_folder_is_complete_and_sound(quantized, model):
    summary = verify(quantized)
    assert summary.modules == 14 and summary.profiles == ["2.5", "3.0", "3.5", "4.0", "5.0"]
    tiles = sum(summary.tile_counts.values())
    assert summary.tile_counts[4] == round(0.6 * tiles)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "recipe.yaml",
        "calibration_report.json",
        "SHA256SUMS",
    ):
        assert (quantized / name).is_file(), name
    schema = Checkpoint.open(quantized).schema
    assert schema.ignore == ["lm_head"] and schema.profiles.default == "3.0"
    assert schema.groups["model.layers.0.self_attn.q_proj"] == [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    report = json.loads((quantized / "calibration_report.json").read_text())
    assert report["calibration_tokens"] == 4 * 64 and set(report["seconds"]) == {
        "inputs",
        "scales",
        "scores",
        "codes",
        "thresholds",
    }
    assert "TileQuantModifier" in str(yaml.safe_load((quantized / "recipe.yaml").read_text()))
    assert all((f.stat().st_mode & 0o444) == 0o444 for f in quantized.iterdir())


def test_dense_tensors_are_the_source_s_own_and_weights_are_close(quantized, model):
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    dense = load_dense(quantized, dtype=torch.float32).state_dict()
    assert set(source) == set(dense)
    quantized_names = {f"{n}.weight" for n in Checkpoint.open(quantized).schema.modules}
    for name, t in source.items():
        if name in quantized_names:
            assert (dense[name] - t).norm() < 0.2 * t.norm(), name  # 4 bits and one scale per tile leave about 0.13
        else:
            assert torch.equal(dense[name], t), name


def test_the_same_run_gives_the_same_bytes(quantized, model, text, tmp_path):
    quantize(str(model), tmp_path / "again", data=text, samples=4, length=64, seed=0)
    assert hashes(tmp_path / "again") == hashes(quantized)


def test_oneshot_with_options_saves_packed_or_dense_and_stays_usable(model, text, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    records = load_calibration(text, tokenizer, samples=2, length=32)
    shares = [0.25, 0.19, 0.37, 0.19, 0.0]
    modifier = TileQuantModifier(
        w4_fraction=1.0, codes="rtn", scales="mse", scores="random", output_transform="none", thresholds="percentile",
        profiles={"p": shares}, default_profile="p", ignore=["lm_head", "re:.*down_proj$"],
    )  # fmt: skip
    oneshot(
        model=network, tokenizer=tokenizer, dataset=records, recipe=[modifier], num_calibration_samples=2,
        shuffle_calibration_samples=False, output_dir=str(tmp_path / "packed"),
    )  # fmt: skip
    summary = verify(tmp_path / "packed")
    assert set(summary.tile_counts) == {4} and summary.modules == 12 and summary.default_profile == "p"
    schema = Checkpoint.open(tmp_path / "packed").schema
    assert "model.layers.1.mlp.down_proj" in schema.ignore
    # The model in memory is the dequantized one, before and after saving.
    dense = load_dense(tmp_path / "packed", dtype=torch.bfloat16).state_dict()
    for name, t in network.state_dict().items():
        assert torch.equal(t, dense[name]), name
    network.save_pretrained(tmp_path / "dense", save_compressed=False)
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_a_recipe_file_sets_the_fields(model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("w4_fraction: 0.25\ncodes: rtn\nprofiles: {low: 2.0}\ndefault_profile: low\n")
    quantize(str(model), tmp_path / "out", data=text, samples=2, length=32, seed=0, recipe=recipe)
    summary = verify(tmp_path / "out")
    assert summary.profiles == ["low"] and summary.tile_counts[4] == round(0.25 * sum(summary.tile_counts.values()))


@pytest.mark.parametrize(("wide", "stored_bits"), [(8, 5.3), (6, 4.7), (4, 4.3), (8, 9.0)])
def test_a_budget_in_stored_bits_counts_everything_that_is_stored(model, text, tmp_path, wide, stored_bits):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"stored_bits: {stored_bits}\nmax_bits: {wide}\ncodes: rtn\nprofiles: {{low: 2.0}}\ndefault_profile: low\n"
        "output_transform: best\noutput_seeds: 3\nscores: joint\n"
    )
    quantize(str(model), tmp_path / "out", data=text, samples=2, length=32, seed=0, recipe=recipe)
    summary = verify(tmp_path / "out")
    schema = Checkpoint.open(tmp_path / "out").schema
    assert schema.max_bits == wide and len(schema.transforms) == 3
    assert set(summary.tile_counts) <= {4, wide}
    assert summary.stored_bits <= stored_bits
    if summary.tile_counts.get(4, 0) and wide > 4:  # one wide tile more would not fit
        one = (wide - 4) / sum(summary.tile_counts.values())
        assert summary.stored_bits + one > stored_bits
    assert (summary.tile_counts.get(wide, 0) > 0) == (wide == 4 or stored_bits > 4.5)
    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    dense = load_dense(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all((dense[n] - t).norm() < 0.2 * t.norm() for n, t in source.items())


def test_a_budget_below_four_bits_everywhere_is_refused(model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stored_bits: 4.0\n")
    refuses(ValueError, "4 bits everywhere this model stores 4.0", str(model), out=tmp_path / "o", data=text, recipe=recipe)


def refuses(error, message, *args, out, **kwargs):
    with pytest.raises(error, match=message):
        quantize(*args, out, samples=2, length=32, seed=0, **({"data": None} | kwargs))
    assert not list(out.parent.glob(out.name + "*")), "something half-written was left"


def test_bad_input_is_refused_and_nothing_is_left(model, text, quantized, tmp_path, monkeypatch):
    out = tmp_path / "o" / "tq"
    refuses(FormatError, "is not a folder", str(tmp_path / "none"), out=out)
    (tmp_path / "empty").mkdir()
    refuses(FormatError, "no config.json", str(tmp_path / "empty"), out=out)
    refuses(ValueError, "quantized already.*tilequant", str(quantized), out=out)
    refuses(ValueError, "is not a file", str(model), out=out, data=tmp_path / "no.txt")
    (tmp_path / "x.bin").write_text("x")
    refuses(ValueError, "unknown kind '.bin'", str(model), out=out, data=tmp_path / "x.bin")
    (tmp_path / "short.txt").write_text("w3 w4")
    refuses(ValueError, "fewer than one record", str(model), out=out, data=tmp_path / "short.txt")
    ragged = write_model(tmp_path / "ragged", intermediate_size=200)
    refuses(ValueError, r"6 linears(.|\n)*up_proj: \[200, 128\](.|\n)*ignore", str(ragged), out=out, data=text)
    out.mkdir(parents=True)
    with pytest.raises(FileExistsError, match="exists already"):
        quantize(str(model), out, data=text, samples=2, length=32, seed=0)
    out.rmdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda p: type("U", (), {"free": 1000}))
    refuses(OSError, "not enough disk space.*needed.*free", str(model), out=out, data=text)


def test_weights_that_are_not_finite_are_named(model, text, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    network.save_pretrained(tmp_path / "broken")
    write_tokenizer(tmp_path / "broken", 256)
    refuses(
        ValueError, r"not finite in \['model.layers.1.mlp.up_proj'\]", str(tmp_path / "broken"), out=tmp_path / "o", data=text
    )


def test_the_bundled_text_is_there_and_long_enough():
    assert len(bundled_text().read_text().split()) > 5000


def test_norms_of_one_plus_weight_are_stored_as_in_the_source(text, tmp_path):
    """llm-compressor takes them through the sum and back in bfloat16."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=256,
    )  # fmt: skip
    network = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "norm" in name:
                p.normal_().mul_(0.1)
    network.to(torch.bfloat16).save_pretrained(tmp_path / "gemma")
    write_tokenizer(tmp_path / "gemma", 256)
    quantize(str(tmp_path / "gemma"), tmp_path / "tq", data=text, samples=2, length=64, seed=0)
    checkpoint, source = Checkpoint.open(tmp_path / "tq"), network.state_dict()
    names = [n for n in checkpoint.dense_names if "norm" in n]
    assert len(names) == 13
    for name in names:
        assert torch.equal(checkpoint.tensor(name), source[name]), name
