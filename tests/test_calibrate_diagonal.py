"""A folded input diagonal: the model computes what it did, the checkpoint says so, and what cannot take it is refused."""

import copy
import json
import types

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from tiny import VOCAB, records, write_model
from toy import write_tokenizer
from vllm_tilequant.calibrate import diagonal
from vllm_tilequant.calibrate.capture import find_groups
from vllm_tilequant.calibrate.run import quantize
from vllm_tilequant.checkpoint.files import CheckpointError
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.hf import load_dense

pytestmark = pytest.mark.calibrate


def uneven(dtype=torch.bfloat16, heads=4, kv_heads=2, bias=True):
    """A Llama whose weight columns differ in size by more than a power of two, with grouped heads and biases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=32, vocab_size=VOCAB, attention_bias=bias, mlp_bias=bias, initializer_range=0.05,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, m in model.named_modules():
            if isinstance(m, nn.Linear):
                m.weight *= torch.exp2(2 * torch.randn(m.in_features))
                if m.bias is not None:
                    m.bias.normal_()
            elif name.endswith("norm"):
                m.weight.normal_().mul_(0.3).add_(1)
    return model.to(dtype)


def targets(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def fold(model, linears=None):
    linears = linears or targets(model)
    groups = find_groups(model, linears, records()[0])
    return groups, diagonal.fold(model, linears, groups, records()[0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "bias"), [(4, False), (2, True), (1, True)])
def test_the_model_computes_the_same_bits_with_other_weights(dtype, kv_heads, bias):
    model = uneven(dtype, kv_heads=kv_heads, bias=bias)
    before = copy.deepcopy(model)
    groups, folded = fold(model)
    assert folded == groups and len(groups) == 8
    ids = records(seed=5)[0]["input_ids"]
    assert torch.equal(model(ids).logits, before(ids).logits)
    for group in groups:
        linear, old = model.get_submodule(group.name), before.get_submodule(group.name)
        assert not torch.equal(linear.weight, old.weight)
        if group.name.endswith(("q_proj", "gate_proj")):  # columns of all members together: within half an octave of their mean
            squares = sum(model.get_submodule(n).weight.float().square().sum(0) for n in group.members)
            clamped = (squares.log2() / 2).sub((squares.log2() / 2).mean()).abs()
            assert float((clamped < 0.75).float().mean()) > 0.9 and float(clamped.median()) < 0.4


def test_factors_are_powers_of_two_near_the_columns_sizes():
    d = diagonal.power_of_two(torch.tensor([4.0**-20, 1.0, 4.0, 16.0, 0.0, 3.9, 4.0**20]))
    assert d.tolist()[4] == 1.0  # a silent column
    assert (d.log2() == d.log2().round()).all() and d.min() == 2.0**-3 and d.max() == 2.0**3
    same = diagonal.power_of_two(torch.tensor([0.5, 0.5, 0.5]))
    assert same.tolist() == [1, 1, 1]
    assert diagonal.power_of_two(torch.zeros(3)).tolist() == [1, 1, 1]


def test_a_norm_that_something_else_reads_is_left_alone():
    model = uneven()
    linears = {n: m for n, m in targets(model).items() if not n.endswith("v_proj")}  # stays dense, and reads the norm
    groups, folded = fold(model, linears)
    left = {g.name for g in groups} - {g.name for g in folded}
    assert left == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}


def test_norms_of_one_plus_weight_are_refused_by_name():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=VOCAB,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'model.layers.0.input_layernorm'.*1 \+ weight.*input_diagonal off"):
        fold(Gemma3ForCausalLM(config).eval())


def test_a_model_that_is_connected_in_another_way_is_refused():
    model = uneven()
    mlp = model.model.layers[1].mlp
    plain = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: plain(self, x) + self.down_proj(self.up_proj(x).square()), mlp)
    with pytest.raises(ValueError, match="computes something else afterwards.*input_diagonal off"):
        fold(model)


def test_nothing_to_fold_into_is_said():
    model = uneven()
    with pytest.raises(ValueError, match="no norm, up_proj or v_proj was found"):
        fold(model, {n: m for n, m in targets(model).items() if n.endswith("k_proj")})


@pytest.fixture(scope="module")
def folded(text, tmp_path_factory):
    """Folders of a source and of two quantizations of it, with the diagonal folded and without, all tiles at 8 bits."""
    folder = tmp_path_factory.mktemp("folded")
    source = write_model(folder / "model")
    for choice in ("folded", "off"):
        recipe = folder / f"{choice}.yaml"
        recipe.write_text(f"input_diagonal: {choice!r}\nw4_fraction: 0.0\nscores: joint\ncodes: rtn\n")
        quantize(str(source), folder / choice, data=text, samples=2, length=64, seed=0, recipe=recipe)
    return source, folder / "folded", folder / "off"


@torch.no_grad()
def test_a_checkpoint_says_it_and_is_as_close_to_its_source(folded, tilequant):
    source, out, plain = folded
    assert verify(out).modules == 14
    schema = Checkpoint.open(out).schema
    assert schema.required_features == ["folded_input_diagonal"]
    assert schema.folded_input_diagonal == list(schema.groups)
    assert not Checkpoint.open(plain).schema.folded_input_diagonal
    report = json.loads((out / "calibration_report.json").read_text())
    assert report["folded_input_diagonal"] == {"groups": sorted(schema.groups), "not_folded": []}
    ids = torch.arange(3, 60)[None]
    want = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits
    error, usual = ((load_dense(f, dtype=torch.float32)(ids).logits - want).norm() / want.norm() for f in (out, plain))
    assert float(error) < 1.2 * float(usual) < 0.05
    code, said, _ = tilequant("inspect", out)
    assert code == 0 and "diagonal     folded into the inputs of 14 linears" in said
    assert (
        "| input diagonal | folded in 14 linears: LoRA adapters of the base model do not fit |"
        in (out / "README.md").read_text()
    )
    with pytest.raises(CheckpointError, match="input diagonal is folded"):
        verify(out, source)


def test_inside_oneshot_norms_of_one_plus_weight_are_refused_too(text, tmp_path):
    config = Gemma3TextConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=256,
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "gemma")
    write_tokenizer(tmp_path / "gemma", 256)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("input_diagonal: folded\n")
    with pytest.raises(ValueError, match=r"'model.layers.0.input_layernorm'.*1 \+ weight"):
        quantize(str(tmp_path / "gemma"), tmp_path / "tq", data=text, samples=2, length=32, seed=0, recipe=recipe)
    assert not (tmp_path / "tq").exists()
