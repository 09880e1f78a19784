"""The output head quantized as well, tied to the embeddings in the source or not."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny import llama, records, write_model, write_text
from vllm_tilequant import hf
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.run import quantize
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.checkpoint.deep import compare
from vllm_tilequant.checkpoint.reader import Checkpoint, CheckpointError

pytestmark = pytest.mark.calibrate


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_gets_wide_tiles_and_the_embeddings_stay(tmp_path, tied):
    source = write_model(tmp_path / "model", tie_word_embeddings=tied)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lm_head: wide\nscores: joint\nscore_samples: 2\n")
    out = tmp_path / "out"
    quantize(str(source), out, data=write_text(tmp_path / "text.txt"), samples=4, length=32, seed=0, recipe=recipe)
    checkpoint = Checkpoint.open(out)
    head = checkpoint.schema.modules["lm_head"]
    assert head.tile_counts == {8: 4 * 2} and head.input_group == "lm_head" and not checkpoint.schema.ignore
    others = [m for n, m in checkpoint.schema.modules.items() if n != "lm_head"]
    narrow, tiles = sum(m.tile_counts.get(4, 0) for m in others), sum(m.n_tiles * m.k_tiles for m in others)
    assert narrow == round(0.6 * tiles)  # the budget is that of the others
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    wanted = before["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    dense = hf.load_dense(out)
    assert float((dense.lm_head.weight - wanted).norm() / wanted.norm()) < 0.05
    ids = torch.arange(3, 40)[None]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    graded = hf.load_reference(out, profile="full", activation="none", graded="always")
    for model in (loaded, graded):
        assert torch.allclose(model(ids).logits, dense(ids).logits, atol=1e-3)
    assert compare(checkpoint, source).faults == []


def test_a_config_that_still_ties_the_head_is_refused(tmp_path):
    from toy import write_toy

    folder = write_toy(tmp_path / "toy", head=True)
    assert "lm_head" in Checkpoint.open(folder).schema.modules
    config = json.loads((folder / "config.json").read_text())
    for value in (True, None):
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": value}))
        with pytest.raises(CheckpointError, match="tie_word_embeddings is not false"):
            Checkpoint.open(folder)


def test_without_the_setting_the_head_is_no_part_of_the_run():
    model, linears = llama()
    run = Calibration(model, linears, records(n=1), Settings(codes="rtn", profiles={"3.0": 3.0}))
    assert run.head is None
    with_head = Calibration(model, linears | {"lm_head": model.lm_head}, records(n=1), Settings(codes="rtn"))
    assert with_head.head == "lm_head" and "lm_head" not in with_head._tile_shapes()
