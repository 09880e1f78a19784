"""`tilequant convert` to and from the forms of other quantizers; the dense form is in test_tools_run.py."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import TRANSFORMS, write_toy
from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint import foreign
from vllm_tilequant.checkpoint.compressed import round_anew
from vllm_tilequant.checkpoint.convert import to_dense
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.kernels import portable

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
IDS = torch.arange(3, 40)[None]


def plain(folder, **options):
    """A toy whose outputs are not rotated."""
    write_toy(folder, **options)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(s.OUTPUT_TRANSFORM):
            tensors[name].zero_()
    assert TRANSFORMS[0].kind == "identity"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weight(folder, name):
    checkpoint = Checkpoint.open(folder)
    return portable.dequantize(checkpoint.module(name).weight, checkpoint.transforms, torch.float32)


def logits(folder, dtype=torch.float32):
    """Of transformers' own loader, with compressed-tensors where the folder asks for it."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return model(IDS).logits.float()


def ours(folder, dtype=torch.float32):
    from vllm_tilequant import hf

    with torch.no_grad():
        return hf.load_dense(folder, dtype)(IDS).logits.float()


@pytest.mark.parametrize("kind, scheme", [("all4", "w4a16"), ("mixed2468", "w8a16")])
def test_unrotated_groups_keep_codes_and_scales(tmp_path, tilequant, kind, scheme):
    """In float32 nothing changes, so that the logits are ours bit for bit; in bfloat16 the scales are rounded."""
    folder = plain(tmp_path / "toy", kind=kind, bias=True, dtype=torch.float32)
    code, out, err = tilequant("convert", folder, tmp_path / "out", "--to", scheme, "--dtype", "float32", "--json")
    assert code == 0, err
    errors = json.loads(out)["errors"]
    assert set(errors) == set(Checkpoint.open(folder).schema.modules) and max(errors.values()) == 0
    assert torch.equal(logits(tmp_path / "out"), ours(folder))
    code, out, err = tilequant("convert", folder, tmp_path / "16", "--to", scheme, "--json")
    assert code == 0 and 0 < max(json.loads(out)["errors"].values()) < 2**-8, err
    got, want = logits(tmp_path / "16"), ours(folder)
    assert (got - want).norm() / want.norm() < 0.02
    for name in ("tokenizer.json", "generation_config.json", "SHA256SUMS"):
        assert (tmp_path / "out" / name).is_file()


def test_what_a_form_cannot_hold_is_named_with_the_way_out(tmp_path, tilequant):
    rotated, mixed = write_toy(tmp_path / "rotated", kind="all4"), plain(tmp_path / "mixed", kind="mixed48")
    code, _, err = tilequant("convert", rotated, tmp_path / "out", "--to", "w4a16")
    assert code == 1 and f"{Q}: its outputs are rotated (randomized_hadamard)" in err and "--requantize" in err
    code, _, err = tilequant("convert", mixed, tmp_path / "out", "--to", "w4a16")
    assert code == 1 and "tiles of 8 bits" in err and "w8a16 holds tiles of every width" in err
    code, _, err = tilequant("convert", mixed, tmp_path / "out", "--to", "w8a8")
    assert code == 1 and "one scale for each output cannot hold one for each tile" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme, weights, outputs", [("w4a16", 0.13, 0.5), ("w8a16", 0.008, 0.03), ("w8a8", 0.012, 0.06)])
def test_rounding_anew_tells_the_error_it_makes(tmp_path, tilequant, scheme, weights, outputs):
    folder = write_toy(tmp_path / "toy", kind="mixed48", tied=False)
    arguments = ("convert", folder, tmp_path / "out", "--to", scheme, "--requantize")
    code, out, err = tilequant(*arguments, "--json")
    assert code == 0, err
    errors = json.loads(out)["errors"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name in (Q, UP):
        n, k = weight(folder, name).shape
        if scheme == "w8a8":
            codes = stored[f"{name}.weight"].float()
        else:
            bits = int(scheme[1])
            codes = foreign.unpack_int32(stored[f"{name}.weight_packed"], bits).float() - (1 << (bits - 1))
        scale = stored[f"{name}.weight_scale"].float()
        dense = codes * scale.repeat_interleave(k // scale.shape[1], 1)
        wanted = weight(folder, name)
        assert errors[name] == pytest.approx(float((dense - wanted).norm() / wanted.norm()), rel=1e-4)
    assert 0 < max(errors.values()) < weights
    want = ours(folder)
    assert (logits(tmp_path / "out") - want).norm() / want.norm() < outputs
    shutil.rmtree(tmp_path / "out")
    assert "largest" in tilequant(*arguments)[1]


def test_rounding_anew_is_no_worse_than_the_largest_value_as_the_scale():
    dense = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for bits in (4, 8):
        codes, scale = round_anew(dense, bits, 64, torch.float32)
        half = 1 << (bits - 1)
        plain_scale = dense.view(64, 2, 64).abs().amax(2) / (half - 0.5)
        spread = plain_scale.repeat_interleave(64, 1)
        naive = (dense / spread).round().clamp(-half, half - 1) * spread
        found = codes.float() * scale.repeat_interleave(64, 1)
        assert (found - dense).norm() < (0.97 if bits == 4 else 1.0001) * (naive - dense).norm()
    assert torch.equal(round_anew(torch.zeros(64, 64), 4, 64, torch.bfloat16)[0], torch.zeros(64, 64, dtype=torch.int8))


# -- from other quantizers ----------------------------------------------------------------------------------------------------

SCHEMES = {
    "w4 block": dict(num_bits=4, strategy="block", block_structure=[64, 64]),
    "w8 block": dict(num_bits=8, strategy="block", block_structure=[64, 64]),
    "w8 tensor": dict(num_bits=8, strategy="tensor"),
    "w4 group": dict(num_bits=4, strategy="group", group_size=64),
    "w4 group asymmetric": dict(num_bits=4, strategy="group", group_size=64, symmetric=False),
    "w8 channel, a8": dict(num_bits=8, strategy="channel"),
}


@pytest.fixture(scope="module")
def compressed(model, tmp_path_factory):
    """Name of a scheme -> folder that llm-compressor wrote."""
    pytest.importorskip("llmcompressor")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    made = {}

    def get(name):
        if name not in made:
            weights = QuantizationArgs(**({"type": "int", "symmetric": True} | SCHEMES[name]))
            a8 = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True) if name.endswith("a8") else None
            groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights, input_activations=a8)}
            folder = tmp_path_factory.mktemp("compressed") / name.replace(" ", "-")
            network = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
            oneshot(
                model=network,
                recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]),
                output_dir=str(folder),
            )
            shutil.copy(model / "tokenizer.json", folder)
            made[name] = folder
        return made[name]

    return get


def unpacked(folder, name, bits):
    """A linear as compressed-tensors itself decompresses it."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        linear = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_submodule(name)
        linear(torch.zeros(1, linear.in_features))
        return linear.weight.detach().float()


@pytest.mark.parametrize("scheme", ["w4 block", "w8 block", "w8 tensor"])
def test_scales_of_tiles_or_coarser_are_taken_as_they_are(compressed, tmp_path, tilequant, scheme):
    source = compressed(scheme)
    code, out, err = tilequant("convert", source, tmp_path / "tq", "--to", "tilequant", "--json")
    assert code == 0, err
    assert set(json.loads(out)["errors"].values()) == {0.0}
    checkpoint = Checkpoint.open(tmp_path / "tq")
    assert verify(tmp_path / "tq").tile_counts == {int(scheme[1]): sum(verify(tmp_path / "tq").tile_counts.values())}
    stored, read = load_file(source / "model.safetensors"), foreign.Foreign.open(source)
    for name in checkpoint.schema.modules:
        dense = read.linear(name).dense()
        assert torch.equal(weight(tmp_path / "tq", name), dense)
        scale = stored[f"{name}.weight_scale"].float().unique()
        assert torch.equal(checkpoint.module(name).weight.tile_scale.unique(), scale)
    assert checkpoint.schema.ignore == ["lm_head"] and checkpoint.schema.profiles.names == ["stored"]
    together = checkpoint.schema.groups["model.layers.0.self_attn.q_proj"]
    assert set(together) == {f"model.layers.0.self_attn.{p}_proj" for p in "qkv"}
    text = (tmp_path / "tq" / "README.md").read_text()
    assert "converted from compressed-tensors" in text
    from vllm_tilequant import hf

    graded = hf.load_reference(tmp_path / "tq", profile="stored", activation="none", graded="always")
    with torch.no_grad():
        got, want = graded(IDS).logits, ours(tmp_path / "tq")
    assert (got - want).norm() / want.norm() < 1e-5 and hf.take_counts(graded).bits_per_weight == int(scheme[1])


@pytest.mark.parametrize("scheme", ["w4 group", "w4 group asymmetric", "w8 channel, a8"])
def test_finer_scales_are_refused_or_rounded_to_8_bits(compressed, tmp_path, tilequant, scheme):
    source = compressed(scheme)
    code, _, err = tilequant("convert", source, tmp_path / "tq", "--to", "tilequant")
    assert code == 1 and f"{Q}: its scales differ inside tiles" in err and "quantize the original model" in err
    code, out, err = tilequant("convert", source, tmp_path / "tq", "--to", "tilequant", "--requantize", "--json")
    assert code == 0, err
    errors = json.loads(out)["errors"]
    assert 0 < max(errors.values()) < 0.012
    read = foreign.Foreign.open(source)
    for name in (Q, UP):
        dense = read.linear(name).dense()
        got = weight(tmp_path / "tq", name)
        assert errors[name] == pytest.approx(float((got - dense).norm() / dense.norm()), rel=1e-3)


@pytest.mark.parametrize("scheme", [n for n in SCHEMES if "block" not in n])
def test_a_foreign_checkpoint_as_a_dense_model_is_what_transformers_makes_of_it(compressed, tmp_path, scheme):
    source = compressed(scheme)
    to_dense(source, tmp_path / "dense", torch.float32)
    got, want = logits(tmp_path / "dense"), logits(source)
    # with 8-bit activations transformers quantizes them as well
    assert (got - want).norm() / want.norm() < (0.05 if scheme.endswith("a8") else 1e-5)


def pack(values, bits):
    """[rows, columns] int64 -> int32 words along the columns, the first value in the lowest bits."""
    per_word = 32 // bits
    words = sum(values[:, i::per_word] << (bits * i) for i in range(per_word))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def write_gptq(folder, dense, bits, group, order=None, version="gptq"):
    """A GPTQ folder after the format's description: qweight packs inputs, qzeros outputs; returns what it holds, dense."""
    config = json.loads((dense / "config.json").read_text())
    tensors, kept, held = load_file(dense / "model.safetensors"), {}, {}
    half, top = 1 << (bits - 1), (1 << bits) - 1
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            kept[name] = w.clone()
            continue
        n, k = w.shape
        g_idx = torch.arange(k) // group if order is None else order(k) // group
        scale = torch.stack([w[:, g_idx == g].abs().amax(1).float() / half for g in range(k // group)]).half()  # [groups, N]
        zero = half + (torch.arange(n) % 3 - 1 if version == "gptq_v2" else torch.zeros(n, dtype=torch.long))  # v2: asymmetric
        spread = scale.float()[g_idx].T
        codes = (w.float() / spread + zero[:, None]).round().clamp(0, top).to(torch.int64)
        held[module] = (codes - zero[:, None]) * spread
        kept[f"{module}.qweight"] = pack(codes, bits).T
        kept[f"{module}.qzeros"] = pack((zero - int(version == "gptq")).expand(k // group, n), bits)
        kept[f"{module}.scales"], kept[f"{module}.g_idx"] = scale, g_idx.int()
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in kept.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return held


@pytest.mark.parametrize(
    "bits, version, ordered", [(4, "gptq", True), (8, "gptq", True), (4, "gptq_v2", True), (4, "gptq", False)]
)
def test_gptq(toy, tmp_path, tilequant, bits, version, ordered):
    to_dense(toy, tmp_path / "source", torch.float32)
    order = None if ordered else lambda k: torch.randperm(k, generator=torch.Generator().manual_seed(k))
    held = write_gptq(tmp_path / "gptq", tmp_path / "source", bits, 64, order, version)
    to_dense(tmp_path / "gptq", tmp_path / "dense", torch.float32)
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    for name, wanted in held.items():
        assert torch.equal(stored[f"{name}.weight"], wanted), name
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    code, _, err = tilequant("convert", tmp_path / "gptq", tmp_path / "tq", "--to", "tilequant")
    assert code == 1 and "its scales differ inside tiles" in err
    code, out, err = tilequant("convert", tmp_path / "gptq", tmp_path / "tq", "--to", "tilequant", "--requantize", "--json")
    assert code == 0 and 0 < max(json.loads(out)["errors"].values()) < 0.012, err
    assert verify(tmp_path / "tq").modules == 14
    assert torch.equal(Checkpoint.open(tmp_path / "tq").module(Q).bias, Checkpoint.open(toy).module(Q).bias)


def test_other_sources_are_refused_in_a_sentence(toy, tmp_path, tilequant):
    to_dense(toy, tmp_path / "source")
    code, _, err = tilequant("convert", tmp_path / "source", tmp_path / "out", "--to", "tilequant")
    assert code == 1 and "use tilequant quantize" in err
    assert "a tilequant checkpoint already" in tilequant("convert", toy, tmp_path / "out", "--to", "tilequant")[2]
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    for quantization, said in (
        ({"quant_method": "awq"}, "quant_method 'awq': of other quantizers"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "is in the format ['float-quantized']"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"a": 1}}, "online transforms"),
        ({"quant_method": "gptq", "bits": 4}, "no tensor is quantized"),
    ):
        (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        for to in ("tilequant", "dense"):
            code, _, err = tilequant("convert", tmp_path / "source", tmp_path / "out", "--to", to)
            assert code == 1 and said in err and not (tmp_path / "out").exists()


def test_damaged_foreign_linears_are_named(toy, tmp_path, tilequant):
    to_dense(toy, tmp_path / "source", torch.float32)
    write_gptq(tmp_path / "gptq", tmp_path / "source", 4, 64)
    path = tmp_path / "gptq" / "model.safetensors"
    good = load_file(path)
    for leaf, change, said in (
        ("scales", lambda t: t.fill_(torch.inf), "its scales are not finite"),
        ("scales", lambda t: t.neg_(), "negative scales"),
        ("g_idx", lambda t: t.add_(100), "g_idx does not name one of"),
    ):
        tensors = {n: t.clone() for n, t in good.items()}
        change(tensors[f"{Q}.{leaf}"])
        save_file(tensors, path)
        code, _, err = tilequant("convert", tmp_path / "gptq", tmp_path / "out", "--to", "dense")
        assert code == 1 and f"{Q}: " in err and said in err


def test_a_stranger_s_foreign_folder_is_read_or_refused_in_words(toy, compressed, tmp_path):
    """Mutants of a GPTQ and a compressed-tensors folder, made as `fuzz_checkpoint.py` makes them: no other kind of error."""
    import fuzz_checkpoint as fuzz

    to_dense(toy, tmp_path / "source", torch.float32)
    write_gptq(tmp_path / "gptq", tmp_path / "source", 4, 64)
    bases = [tmp_path / "gptq", compressed("w4 group asymmetric"), compressed("w8 channel, a8")]
    changes = [fuzz.config_values, fuzz.header_values, fuzz.small_tensors, fuzz.surroundings, fuzz.size, without_a_tensor]
    outcomes = []
    for number in range(240):
        r = random.Random(number)
        folder = shutil.copytree(r.choice(bases), tmp_path / "mutant")
        r.choice(changes)(folder, r)
        try:
            with torch.no_grad():
                to_dense(folder, tmp_path / "out", torch.float32)
            outcomes.append("read")
        except (ValueError, NotImplementedError, OSError) as e:
            assert str(e) and len(str(e)) < 8000, number
            outcomes.append("refused")
        except Exception as e:
            raise AssertionError(f"mutant {number}") from e
        for left in ("mutant", "out", "mutant-outside"):
            shutil.rmtree(tmp_path / left, ignore_errors=True)
        (tmp_path / "mutant-outside").unlink(missing_ok=True)
    assert outcomes.count("read") > 20 and outcomes.count("refused") > 60


def without_a_tensor(folder, r):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[r.choice([n for n in tensors if "_proj" in n])]
    save_file(tensors, path)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_a_quantized_output_head_is_written_dense(tmp_path, tilequant, scheme):
    folder = write_toy(tmp_path / "toy", head=True)
    code, out, err = tilequant("convert", folder, tmp_path / "out", "--to", scheme, "--requantize", "--json")
    assert code == 0, err
    assert "lm_head" not in json.loads(out)["errors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "lm_head" in config["quantization_config"]["ignore"]
    want = ours(folder)
    assert (logits(tmp_path / "out") - want).norm() / want.norm() < 0.06
    to_dense(folder, tmp_path / "dense", torch.float32)
    assert torch.equal(logits(tmp_path / "dense"), want)
