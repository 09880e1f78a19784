"""Ours after llm-compressor's own modifiers, in one recipe: what they did stays, and what they would save does not."""

import json

import pytest
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.transform import SpinQuantModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_tilequant.calibrate.data import load_calibration
from vllm_tilequant.calibrate.modifier import TileQuantModifier
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.hf import load_dense

pytestmark = pytest.mark.calibrate


def blocks(bits):
    """GPTQ with one scale for 64 x 64 weights."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "block", "block_structure": [64, 64]}
    return GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])


def run(model, text, recipe, out=None, dtype="auto"):
    """The model in memory after a recipe."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    oneshot(
        model=network, tokenizer=tokenizer, dataset=load_calibration(text, tokenizer, samples=4, length=64), recipe=recipe,
        num_calibration_samples=4, shuffle_calibration_samples=False, output_dir=out and str(out),
    )  # fmt: skip
    return network


@torch.no_grad()
def logits(model):
    return model(torch.arange(3, 60)[None]).logits.float()


SMOOTH = lambda: SmoothQuantModifier(smoothing_strength=0.5)  # noqa: E731
SPIN = lambda: SpinQuantModifier(rotations=["R1", "R2"], transform_block_size=64)  # noqa: E731
CHAINS = {
    "nothing": [],
    "SmoothQuant": [SMOOTH],
    "SpinQuant": [SPIN],
    "GPTQ in blocks": [lambda: blocks(8)],
    "all": [SMOOTH, SPIN, lambda: blocks(8)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_the_result_is_sound_and_near_what_the_others_made(chain, model, text, tmp_path):
    out = tmp_path / "tq"
    network = run(model, text, [*(m() for m in CHAINS[chain]), TileQuantModifier(w4_fraction=0.0)], out)
    assert verify(out).modules == 14
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "tilequant"
    assert config["tie_word_embeddings"] == ("SpinQuant" not in chain and chain != "all")  # it unties the head
    names = set(Checkpoint.open(out).dense_names)
    assert not [n for n in names if "scale" in n or "zero_point" in n or "g_idx" in n], names
    # SpinQuant centres the embeddings, which is no small change of this model: what it made is what ours must be near.
    want = logits(run(model, text, [m() for m in CHAINS[chain]], dtype=torch.float32) if chain != "nothing" else source(model))
    for made in (load_dense(out, dtype=torch.float32), network):
        assert float((logits(made) - want).norm() / want.norm()) < 0.05
    state = network.state_dict()
    for name, t in load_dense(out, dtype=torch.bfloat16).state_dict().items():
        assert torch.equal(state[name], t), name


def source(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_what_another_modifier_quantized_beside_ours_is_refused(model, text, tmp_path):
    ours = TileQuantModifier(w4_fraction=0.0, ignore=["lm_head", "re:.*down_proj$"])
    with pytest.raises(ValueError, match=r"has quantized \['model.layers.0.mlp.down_proj', 'model.layers.1.mlp.down_proj'\]"):
        run(model, text, [blocks(8), ours], tmp_path / "tq")
    assert not (tmp_path / "tq").exists()


def test_a_chain_in_a_recipe_file(model, text, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "tile_stage:\n  quant_modifiers:\n    SmoothQuantModifier: {smoothing_strength: 0.5}\n"
        "    TileQuantModifier: {w4_fraction: 0.25, codes: rtn, profiles: {low: 2.0}, default_profile: low}\n"
    )
    run(model, text, str(recipe), tmp_path / "tq")
    summary = verify(tmp_path / "tq")
    assert summary.profiles == ["low"] and summary.tile_counts[4] == round(0.25 * sum(summary.tile_counts.values()))
    theirs = AutoModelForCausalLM.from_pretrained(model).state_dict()
    checkpoint = Checkpoint.open(tmp_path / "tq")
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(checkpoint.tensor(name), theirs[name])  # smoothed
