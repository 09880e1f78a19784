"""The transformers model against the float64 reference, layer by layer, and what loading refuses."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers reference needs the calibration environment")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cases import THRESHOLDS, make_rows
from tolerances import FLOAT32_RMS, relative_rms
from toy import ROTATED, write_toy
from vllm_tilequant import hf
from vllm_tilequant.checkpoint.reader import Checkpoint, CheckpointError
from vllm_tilequant.kernels import layout, reference
from vllm_tilequant.schema import LEVELS, FormatError

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("toy") / "toy", kind="mixed2468", bias=True)


@pytest.fixture(scope="module")
def model(folder):
    return hf.load_reference(folder)


def layers(folder, model):
    checkpoint = Checkpoint.open(folder)
    for name, layer in model.tilequant.layers.items():
        stored = checkpoint.module(name)
        yield layer, stored, checkpoint.transforms[stored.weight.output_transform.long()]


def thresholds_of(schema, stored, profile):
    return stored.thresholds[schema.profile_row(profile)] if profile != "full" else torch.full((4,), -1.0)


@pytest.mark.parametrize("activation", ["none", "group64"])
@pytest.mark.parametrize("profile", ["2.0", "3.0", "4.0", "full"])
def test_always_is_the_graded_product_of_many_rows(folder, model, profile, activation):
    hf.set_mode(model, profile=profile, activation=activation, graded="always")
    for layer, stored, matrices in layers(folder, model):
        x = make_rows(17, layer.in_features)
        thresholds = thresholds_of(model.tilequant.schema, stored, profile)
        want = reference.decode_bitplane_ref(x, stored.weight, matrices, thresholds, stored.bias, int8=activation == "group64")
        assert relative_rms(layer(x), want) <= FLOAT32_RMS


@pytest.mark.parametrize("activation", ["none", "group64"])
@pytest.mark.parametrize("mode", [{"graded": "never", "profile": "3.0"}, {"graded": "always", "profile": "off"}])
def test_never_and_profile_off_are_the_static_product(folder, model, mode, activation):
    hf.set_mode(model, activation=activation, **mode)
    for layer, stored, matrices in layers(folder, model):
        x = make_rows(3, layer.in_features)
        want = reference.linear_ref(x, stored.weight, matrices, stored.bias, int8=activation == "group64")
        assert relative_rms(layer(x), want) <= FLOAT32_RMS


def test_rows_is_graded_up_to_the_limit_and_static_above(model):
    layer = next(iter(model.tilequant.layers.values()))
    x = make_rows(9, layer.in_features).view(3, 3, -1)

    def run(rows, **mode):
        hf.set_mode(model, profile="3.0", activation="group64", **mode)
        return layer(rows)

    for rows, graded in ((x, False), (x.reshape(1, 9, -1)[:, :8], True), (x[0, 0], True)):
        got = run(rows, graded="rows", graded_rows=8)
        want = {g: run(rows, graded=g) for g in ("always", "never")}
        assert got.shape == (*rows.shape[:-1], layer.out_features)
        assert torch.equal(got, want["always" if graded else "never"])
        assert not torch.equal(want["always"], want["never"])


def test_loaded_bits_are_those_of_the_levels(folder, model):
    hf.set_mode(model, profile="3.0", activation="group64", graded="always")
    hf.take_counts(model)
    total = 0.0
    for layer, stored, _ in layers(folder, model):
        x = make_rows(5, layer.in_features)
        layer(x)
        levels = reference.levels_ref(x, thresholds_of(model.tilequant.schema, stored, "3.0"))
        wanted = float(layout.loaded_code_bits(levels, stored.weight.tile_bits).sum())
        counts = layer.take_counts()
        assert counts.loaded_bits == wanted
        assert counts.weights == 5 * layer.out_features * layer.in_features
        assert counts.level_shares == [float((levels == b).double().mean()) for b in LEVELS]
        layer(x)
        total += wanted
    assert hf.take_counts(model).loaded_bits == total
    assert hf.take_counts(model).weights == 0


def test_static_products_count_what_is_stored(folder, model):
    hf.set_mode(model, profile="off")
    hf.take_counts(model)
    model(torch.arange(3, 9)[None])
    counts = hf.take_counts(model)
    assert counts.bits_per_weight == pytest.approx(Checkpoint.open(folder).stored_code_bits(), abs=1e-12)
    assert counts.level_shares is None


@pytest.mark.parametrize("values", THRESHOLDS.values(), ids=THRESHOLDS)
def test_fast_levels_are_the_reference_levels(values):
    thresholds = torch.tensor(values)
    x = make_rows(7, 320)
    x[0, :4] = thresholds  # equal to a threshold is not above it
    x[1, :4] = -torch.nextafter(thresholds, torch.full((4,), torch.inf))
    assert torch.equal(hf.fast_levels(x, thresholds), reference.levels_ref(x, thresholds))


def test_rotated_inputs(tmp_path):
    folder = write_toy(tmp_path / "toy", kind="mixed2468", rotated=ROTATED)
    model = hf.load_reference(folder, profile="3.0", graded="always")
    rotated = 0
    for layer, stored, matrices in layers(folder, model):
        x = make_rows(5, layer.in_features)
        seen = x if stored.weight.input_rotation is None else layout.rotate_inputs(x, stored.weight.input_rotation)
        rotated += seen is not x
        t = thresholds_of(model.tilequant.schema, stored, "3.0")
        for activation in ("none", "group64"):
            hf.set_mode(model, activation=activation, graded="always")
            want = reference.decode_bitplane_ref(seen, stored.weight, matrices, t, stored.bias, int8=activation == "group64")
            assert relative_rms(layer(x), want) <= FLOAT32_RMS
            hf.set_mode(model, graded="never")
            want = reference.linear_ref(seen, stored.weight, matrices, stored.bias, int8=activation == "group64")
            assert relative_rms(layer(x), want) <= FLOAT32_RMS
    assert rotated == 2 * 3
    ids = torch.arange(3, 60)[None]
    hf.set_mode(model, profile="off", activation="none")
    assert torch.allclose(hf.load_dense(folder)(ids).logits, model(ids).logits, atol=1e-4)


def test_without_a_cache_the_result_is_the_same(folder, model):
    other = hf.load_reference(folder, graded="always", cache_levels=False)
    hf.set_mode(model, profile="3.0", activation="group64", graded="always")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert not any(layer._levels for layer in other.tilequant.layers.values())


def test_dense_model_equals_profile_off_without_activations(folder, model):
    ids = torch.arange(3, 60)[None]
    hf.set_mode(model, profile="off", activation="none")
    dense = hf.load_dense(folder)
    assert torch.equal(dense(ids).logits, model(ids).logits)
    assert dense.lm_head.weight is dense.model.embed_tokens.weight
    assert getattr(dense.config, "quantization_config", None) is None


def test_a_dense_model_saves_and_loads_as_an_ordinary_one(folder, tmp_path):
    dense = hf.load_dense(folder)
    dense.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 60)[None]
    assert torch.equal(dense(ids).logits, again(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_from_pretrained_gives_the_dense_model(folder, tmp_path, dtype):
    plain, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(3, 60)[None]
    assert torch.equal(plain(ids).logits, hf.load_dense(folder, dtype)(ids).logits)
    assert getattr(plain.config, "quantization_config", None) is None
    plain.save_pretrained(tmp_path)  # an ordinary model again
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)(ids).logits, plain(ids).logits)


@pytest.mark.parametrize(
    "name,change,error",
    [
        (f"{Q}.weight_tile_scale", lambda t: t.fill_(-1), "not finite and > 0"),
        (f"{Q}.weight_plane1", None, "weight_plane1: missing"),
        ("model.norm.weight", None, "model.norm.weight: in the model, not in the checkpoint"),
        ("model.norm.weight", lambda t: t.fill_(float("nan")), "model.norm.weight is not finite"),
    ],
)
def test_plain_from_pretrained_never_returns_random_weights(folder, tmp_path, name, change, error):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    if change:
        change(tensors[name])
    else:
        del tensors[name]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=error):
        AutoModelForCausalLM.from_pretrained(broken)


def test_plain_from_pretrained_takes_one_device(folder):
    pytest.importorskip("accelerate")  # without it, transformers refuses any device_map itself
    with pytest.raises(NotImplementedError, match="onto one device"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="auto")


@pytest.mark.parametrize(
    "mode,error",
    [
        ({"profile": "9.9"}, "unknown profile '9.9'"),
        ({"activation": "int4"}, "'none', 'group64'"),
        ({"graded": "yes"}, "always"),
    ],
)
def test_unknown_modes_are_refused(folder, model, mode, error):
    with pytest.raises(ValueError, match=error):
        hf.load_reference(folder, **mode)
    before = model.tilequant.mode
    with pytest.raises(ValueError, match=error):
        hf.set_mode(model, **mode)
    assert model.tilequant.mode == before


def test_a_model_loaded_otherwise_has_no_profile(folder):
    with pytest.raises(TypeError, match="was not loaded by"):
        hf.set_profile(hf.load_dense(folder), "3.0")


def broken(folder, target, change_config=None, change_tensors=None):
    shutil.copytree(folder, target)
    if change_config:
        config = json.loads((target / "config.json").read_text())
        change_config(config)
        (target / "config.json").write_text(json.dumps(config))
    if change_tensors:
        tensors = load_file(target / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def drop_norm(tensors):
    del tensors["model.norm.weight"]


def add_tensor(tensors):
    tensors["model.extra.weight"] = torch.zeros(3)


def rename_module(tensors):
    for name in [n for n in tensors if n.startswith("model.layers.1.mlp.down_proj.")]:
        tensors[name.replace("down_proj", "lower_proj")] = tensors.pop(name)


def rename_in_config(config):
    modules = config["quantization_config"]["modules"]
    modules["model.layers.1.mlp.lower_proj"] = modules.pop("model.layers.1.mlp.down_proj")


def drop_scale(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight_tile_scale"]


@pytest.mark.parametrize("load", [hf.load_reference, hf.load_dense])
@pytest.mark.parametrize(
    "config,tensors,error",
    [
        (None, drop_norm, r"model\.norm\.weight: in the model, not in the checkpoint"),
        (None, add_tensor, r"model\.extra\.weight: in the checkpoint, not in the model"),
        (None, drop_scale, r"up_proj\.weight_tile_scale: missing"),
        (rename_in_config, rename_module, r"lower_proj: the model has no such module, wanted Linear"),
        (lambda c: c.update(intermediate_size=256), None, r"the model has \[256, 128\], the checkpoint \[192, 128\]"),
        (lambda c: c.update(vocab_size=250), None, r"embed_tokens\.weight: \[256, 128\] in the checkpoint"),
        (lambda c: c["quantization_config"].update(quant_method="gptq"), None, "quant_method is 'gptq'"),
    ],
)
def test_what_does_not_fit_is_named(folder, tmp_path, load, config, tensors, error):
    with pytest.raises(ValueError, match=error):
        load(broken(folder, tmp_path / "broken", config, tensors))


def test_format_errors_stay_format_errors(tmp_path):
    with pytest.raises(FormatError, match="not a folder"):
        hf.load_reference(tmp_path / "nothing")
