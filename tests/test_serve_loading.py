"""Loading through vLLM's own layers: every rank's weight equals the slice of the checkpoint, every fault is named."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models.utils import WeightsMapper

from cases import TRANSFORMS, default_dtype, make_rows
from layers import PROFILES, Toy, build, feed, on_rank, one_rank, quant_config, vllm_settings  # noqa: F401 - one_rank
from tolerances import FLOAT32_RMS, OUTPUT_RMS, relative_rms
from vllm_tilequant import schema as s
from vllm_tilequant.config import Settings, TileQuantConfig
from vllm_tilequant.kernels import layout, portable, reference

pytestmark = pytest.mark.serve


def check(layer, wanted, bias=None):
    """The layer holds exactly the packed weight `wanted`, and computes what the references say of it."""
    prepared = portable.prepare(wanted, TRANSFORMS)
    for got, want in (
        (layer.weight_packed, prepared.codes),
        (layer.weight_dense, portable.dequantize(wanted, TRANSFORMS, torch.float32)),
        (layer.graded_tile_bits, wanted.tile_bits),
        (layer.graded_tile_scale, wanted.tile_scale),
        (layer.graded_matrices, prepared.matrices),
        (layer.profile_thresholds, PROFILES),
        (layer.active_thresholds, PROFILES[0]),
    ):
        assert torch.equal(got, want)
    matrices = TRANSFORMS[wanted.output_transform.long()]
    for m in (1, 8, 9):
        x = make_rows(m, wanted.in_features)
        got = layer.quant_method.apply(layer, x, bias)
        if m <= 8:
            want = reference.decode_bitplane_ref(x, wanted, matrices, PROFILES[0], bias)
        else:
            want = reference.linear_ref(x, wanted, matrices, bias, int8=True)
        assert relative_rms(got, want) <= FLOAT32_RMS
    assert all(p.dim() <= 3 for p in layer.parameters())


def cut(case, outputs, inputs=None):
    return layout.slice_weight(case.weight, outputs, inputs or (0, case.weight.in_features))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_qkv_with_different_maps_and_replicated_heads(monkeypatch, size, seed):
    """12 q heads and 2 or 3 kv heads: at sizes above them a kv head is loaded by several ranks."""
    kv = {1: 3, 2: 2, 3: 3, 4: 2}[size]
    shapes = {"a.q_proj": (12 * 64, 128), "a.k_proj": (kv * 64, 128), "a.v_proj": (kv * 64, 128)}
    toy = Toy(shapes, bias=tuple(shapes))
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = build(QKVParallelLinear, toy, 128, 64, 12, kv, prefix="a.qkv_proj", bias=True)
        feed(layer, toy, {"a.q_proj": "q", "a.k_proj": "k", "a.v_proj": "v"}, seed=seed + rank)
        q, local, replicas = 768 // size, max(kv // size, 1), max(size // kv, 1)
        ranges = [(rank * q, rank * q + q)] + [(rank // replicas * local * 64, (rank // replicas + 1) * local * 64)] * 2
        wanted = layout.concat_outputs([cut(toy.cases[n], r) for n, r in zip(shapes, ranges, strict=True)])
        bias = torch.cat([toy.tensors[n][s.BIAS][a:b] for n, (a, b) in zip(shapes, ranges, strict=True)])
        assert torch.equal(layer.bias, bias)
        check(layer, wanted, layer.bias)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gate_and_up(monkeypatch, size):
    shapes = {"a.gate_proj": (768, 192), "a.up_proj": (768, 192)}
    toy = Toy(shapes)
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = build(MergedColumnParallelLinear, toy, 192, [768, 768], prefix="a.gate_up_proj")
        feed(layer, toy, {"a.gate_proj": 0, "a.up_proj": 1}, seed=rank)
        part = (rank * 768 // size, (rank + 1) * 768 // size)
        check(layer, layout.concat_outputs([cut(toy.cases[n], part) for n in shapes]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["row", "column"])
def test_unfused_layers(monkeypatch, kind, size):
    toy = Toy({"a.down_proj": (768, 768)}, bias=("a.down_proj",))
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = build(
            RowParallelLinear if kind == "row" else ColumnParallelLinear, toy, 768, 768, prefix="a.down_proj", bias=True
        )
        feed(layer, toy, {"a.down_proj": None}, seed=rank)
        part = (rank * 768 // size, (rank + 1) * 768 // size)
        whole = (0, 768)
        bias = toy.tensors["a.down_proj"][s.BIAS]
        assert torch.equal(layer.bias, bias if kind == "row" else bias[slice(*part)])
        check(layer, cut(toy.cases["a.down_proj"], *((whole, part) if kind == "row" else (part, whole))))


def test_a_replicated_layer(monkeypatch):
    toy = Toy({"a.proj": (128, 192)})
    on_rank(monkeypatch, 1, 2)
    layer = build(ReplicatedLinear, toy, 192, 128, prefix="a.proj")
    feed(layer, toy, {"a.proj": None})
    check(layer, toy.cases["a.proj"].weight)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_that_the_checkpoint_already_fuses(monkeypatch, size):
    """As Phi-3 stores them: one module under the fused name, cut by vLLM."""
    toy = Toy({"a.qkv_proj": (512, 128), "a.gate_up_proj": (512, 128)}, bias=("a.qkv_proj",))
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = build(QKVParallelLinear, toy, 128, 64, 4, 2, prefix="a.qkv_proj", bias=True)
        feed(layer, toy, {"a.qkv_proj": None})
        q, kv = 256 // size, 128 // size
        ranges = [(b + rank * w, b + (rank + 1) * w) for b, w in ((0, q), (256, kv), (384, kv))]
        assert torch.equal(layer.bias, torch.cat([toy.tensors["a.qkv_proj"][s.BIAS][a:b] for a, b in ranges]))
        check(layer, layout.concat_outputs([cut(toy.cases["a.qkv_proj"], r) for r in ranges]))
        layer = build(MergedColumnParallelLinear, toy, 128, [256, 256], prefix="a.gate_up_proj")
        feed(layer, toy, {"a.gate_up_proj": None})
        ranges = [(b + rank * q, b + (rank + 1) * q) for b in (0, 256)]
        check(layer, layout.concat_outputs([cut(toy.cases["a.gate_up_proj"], r) for r in ranges]))


def test_shards_of_several_outputs(monkeypatch):
    """As hybrid models load them: one stored module covers outputs 0 and 1 of three."""
    toy = Toy({"a.xy": (256, 128), "a.z": (128, 128)})
    config = quant_config(toy)
    config.packed_modules_mapping = {"xyz": ["xy", "z"]}
    for rank in range(2):
        on_rank(monkeypatch, rank, 2)
        layer = build(MergedColumnParallelLinear, toy, 128, [128, 128, 128], prefix="a.xyz", quant_config=config)
        feed(layer, toy, {"a.xy": (0, 1), "a.z": 2}, seed=rank)
        ranges = [("a.xy", 0), ("a.xy", 128), ("a.z", 0)]
        parts = [cut(toy.cases[n], (b + rank * 64, b + rank * 64 + 64)) for n, b in ranges]
        check(layer, layout.concat_outputs(parts))


def gate_up(toy=None, **kwargs):
    toy = toy or Toy({"a.gate_proj": (128, 128), "a.up_proj": (128, 128)})
    return toy, build(MergedColumnParallelLinear, toy, 128, [128, 128], prefix="a.gate_up_proj", **kwargs)


SHARDS = {"a.gate_proj": 0, "a.up_proj": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_and_thresholds_stay_float32_in_a_half_precision_model(dtype):
    shapes = {"a.gate_proj": (128, 128), "a.up_proj": (128, 128)}
    toy = Toy(shapes)
    with default_dtype(dtype):
        layer = build(MergedColumnParallelLinear, toy, 128, [128, 128], prefix="a.gate_up_proj", params_dtype=dtype)
        feed(layer, toy, {"a.gate_proj": 0, "a.up_proj": 1})
    wanted = layout.concat_outputs([toy.cases[n].weight for n in shapes])
    assert torch.equal(layer.graded_tile_scale, wanted.tile_scale) and torch.equal(layer.active_thresholds, PROFILES[0])
    assert layer.weight_dense.dtype == dtype and layer.graded_matrices.dtype == torch.float32
    x = make_rows(2, 128, dtype)
    want = reference.decode_bitplane_ref(x, wanted, TRANSFORMS[wanted.output_transform.long()], PROFILES[0])
    assert relative_rms(layer.quant_method.apply(layer, x, None), want) <= OUTPUT_RMS[str(dtype).removeprefix("torch.")]


def test_processing_twice_changes_nothing_and_leaves_nothing_behind():
    toy, layer = gate_up()
    feed(layer, toy, SHARDS)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    assert {n: p.data_ptr() for n, p in layer.named_parameters()}.keys() == before.keys()
    assert all(torch.equal(p, before[n]) for n, p in layer.named_parameters())
    assert set(before) == {"weight_dense", "weight_packed", "graded_tile_bits", "graded_tile_scale", "graded_matrices"}
    assert not layer.tilequant_loading.arrived and "weight_loader" not in vars(layer)


def test_missing_tensors_are_all_named():
    for bias, skip in ((False, [("a.up_proj", s.SCALE), ("a.gate_proj", s.EXTENSION)]), (True, [("a.up_proj", s.BIAS)])):
        shapes = {"a.gate_proj": (128, 128), "a.up_proj": (128, 128)}
        toy, layer = gate_up(Toy(shapes, bias=tuple(shapes) if bias else ()), bias=bias)
        with pytest.raises(ValueError, match="did not arrive") as e:
            feed(layer, toy, SHARDS, skip=skip)
        assert str(e.value).splitlines()[1:] == [f"  {n}.{t}" for n, t in sorted(skip)]


def test_a_bias_that_only_one_side_knows():
    toy, layer = gate_up(bias=True)  # the model has one, the checkpoint has not
    with pytest.raises(ValueError, match=r"(?s)2 tensors.*a\.gate_proj\.bias.*a\.up_proj\.bias"):
        feed(layer, toy, SHARDS)


def zero_first(t):
    t[0, 0] = 0
    return t


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        (s.PLANE0, lambda t: t[:64], r"a\.up_proj\.weight_plane0 is int32 \[64, 8\], wanted int32 \[128, 8\]"),
        (s.PLANE1, lambda t: t.long(), r"a\.up_proj\.weight_plane1 is int64 \[128, 8\], wanted int32"),
        (s.SCALE, lambda t: t.bfloat16(), r"a\.up_proj\.weight_tile_scale is bfloat16 \[2, 2\], wanted float32"),
        (s.MAP, lambda t: t.fill_(5), r"a\.up_proj\.weight_tile_bits holds \[5\], wanted \(2, 4, 6, 8\)"),
        (s.MAP, lambda t: t.fill_(8), r"a\.up_proj\.weight_tile_bits has tiles \{8: 4\}, config.json promises \{4: 4\}"),
        (s.SCALE, zero_first, r"a\.up_proj\.weight_tile_scale holds 1 entries that are not finite and > 0"),
        (s.SCALE, lambda t: t / 0, r"a\.up_proj\.weight_tile_scale holds 4 entries that are not finite"),
        (s.OUTPUT_TRANSFORM, lambda t: t.fill_(3), r"a\.up_proj\.output_transform holds 3, the checkpoint has 3 transforms"),
        (s.THRESHOLDS, lambda t: -t, r"a\.up_proj\.thresholds are not finite and ascending"),
        (s.THRESHOLDS, lambda t: t * 2, r"a\.gate_up_proj: a\.\w+\.thresholds and a\.\w+\.thresholds differ"),
        (
            s.EXTENSION,
            lambda t: t.new_zeros(2, 256),
            r"a\.up_proj\.weight_extension is int32 \[2, 256\], wanted int32 \[0, 256\]",
        ),
    ],
)
def test_a_bad_tensor_is_named(suffix, change, message):
    toy, layer = gate_up()
    with pytest.raises(ValueError, match=message):
        feed(layer, toy, SHARDS, change=(("a.up_proj", suffix), change))


def test_a_tensor_that_comes_twice():
    toy, layer = gate_up()
    tensor = toy.tensors["a.up_proj"][s.PLANE0]
    layer.weight_plane0.weight_loader(layer.weight_plane0, tensor, 1)
    with pytest.raises(ValueError, match=r"a\.up_proj\.weight_plane0 arrived twice"):
        layer.weight_plane0.weight_loader(layer.weight_plane0, tensor, 1)


def test_illegal_tensor_parallel_sizes(monkeypatch):
    toy = Toy({"a.q_proj": (768, 128), "a.k_proj": (128, 128), "a.v_proj": (128, 128), "a.down_proj": (128, 384)})
    on_rank(monkeypatch, 0, 4)
    with pytest.raises(ValueError, match=r"a\.down_proj: with tensor parallel size 4, 384 inputs give 96 .*: \[1, 2, 3, 6\]"):
        build(RowParallelLinear, toy, 384, 128, prefix="a.down_proj")
    with pytest.raises(ValueError, match=r"a\.down_proj: with .* size 4, \[128\] outputs give \[32\] .*: \[1, 2\]"):
        build(ColumnParallelLinear, toy, 384, 128, prefix="a.down_proj")
    with pytest.raises(ValueError, match=r"a\.qkv_proj: with .* size 4, \[768, 128, 128\] outputs .*: \[1, 2\]"):
        build(QKVParallelLinear, toy, 128, 32, 24, 4, prefix="a.qkv_proj")


def test_a_model_of_other_sizes():
    toy = Toy({"a.down_proj": (128, 192)})
    with pytest.raises(ValueError, match=r"a\.down_proj has 192 inputs in quantization_config, 256 in the model"):
        build(RowParallelLinear, toy, 256, 128, prefix="a.down_proj")
    with pytest.raises(ValueError, match=r"a\.down_proj have 128 outputs in quantization_config, 64 in the model"):
        build(RowParallelLinear, toy, 192, 64, prefix="a.down_proj")


def test_which_layers_are_ours():
    toy = Toy({"a.up_proj": (128, 128)}, ignore=["lm_head", "b.gate_proj", "re:b.*up_proj", "re:.*mlp.gate$", "c.gate_up_proj"])
    _, layer = gate_up(Toy({"a.gate_proj": (128, 128), "a.up_proj": (128, 128)}))
    assert type(layer.quant_method).__name__ == "TileQuantLinearMethod"
    config = quant_config(toy)
    for prefix in ("b.gate_up_proj", "model.mlp.gate", "c.gate_up_proj"):
        assert type(config.get_quant_method(layer, prefix)) is UnquantizedLinearMethod
    with pytest.raises(
        ValueError, match=r"a\.gate_up_proj is only partly quantized: a\.gate_proj \(neither\), a\.up_proj \(quan"
    ):
        config.get_quant_method(layer, "a.gate_up_proj")
    with pytest.raises(
        ValueError, match=r"d\.down_proj is neither quantized nor ignored.*Add it to quantization_config.ignore"
    ):
        config.get_quant_method(layer, "d.down_proj")
    config.ignore.append("a.gate_proj")
    with pytest.raises(ValueError, match=r"a\.gate_proj \(ignored\), a\.up_proj \(quantized\)\. Quantize all members"):
        config.get_quant_method(layer, "a.gate_up_proj")
    config.ignore.remove("b.gate_proj")
    with pytest.raises(ValueError, match=r"neither quantized nor ignored: b\.gate_proj \(neither\), b\.up_proj \(ignored\)"):
        config.get_quant_method(layer, "b.gate_up_proj")
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "lm_head") is None
    with pytest.raises(NotImplementedError, match=r"a \(Embedding\) is quantized in this checkpoint"):
        config.get_quant_method(torch.nn.Embedding(2, 2), "a")


def test_renamed_modules_keep_the_checkpoints_names_in_messages():
    toy = Toy({"model.a.down_proj": (128, 128)}, ignore=["lm_head", "re:.*gate"])
    config = quant_config(toy)
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model.", "lm_head.": "x.lm_head."}))
    assert list(config.modules) == ["language_model.model.a.down_proj"] and config.ignore == ["x.lm_head", "re:.*gate"]
    layer = build(RowParallelLinear, toy, 128, 128, prefix="language_model.model.a.down_proj", quant_config=config)
    with pytest.raises(ValueError, match=r"\n  model\.a\.down_proj\.thresholds"):
        feed(layer, toy, {"model.a.down_proj": None}, skip=[("model.a.down_proj", s.THRESHOLDS)])


def test_settings():
    schema = TileQuantConfig.from_config(Toy({"a": (64, 64)}).config).schema
    assert Settings.parse({}, schema) == Settings.parse({"other": 1}, schema) == Settings("3.0", "group64")
    assert Settings.parse(SimpleNamespace(), schema).graded_rows == 8
    assert Settings.parse({"tilequant": {"profile": "off", "activation": "none"}}, schema).graded_rows == 0
    for given, message in (
        ({"profile": "5.0"}, r"profile is '5.0', legal values are \['3.0', '2.0', 'full', 'off'\]"),
        ({"activation": "int4"}, r"activation is 'int4', legal values are \['none', 'group64'\]"),
        ({"prefill_activation": "none"}, r"prefill_activation is 'none', legal values are \['token_smooth', 'group64'\]"),
        (
            {"profil": "3.0"},
            r"unknown keys \['profil'\]; legal keys are 'profile', 'activation', 'prefill_activation' and 'int8",
        ),
        ({"int8_copy": "yes"}, r"int8_copy is 'yes', legal values are \[False, True\]"),
        ({"int8_copy": True, "prefill_activation": "group64"}, r"int8_copy serves prompts with .*'token_smooth' only"),
        ("3.0", r"wanted an object with the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings.parse({"tilequant": given}, schema)


def test_a_wrong_setting_stops_the_first_layer():
    with vllm_settings(profile="5.0"), pytest.raises(ValueError, match=r"profile is '5\.0'"):
        quant_config(Toy({"a": (64, 64)})).get_quant_method(torch.nn.Embedding(2, 2), "embed")


def test_profiles():
    x = make_rows(2, 128)
    outputs = {}
    for profile in ("3.0", "2.0", "full", "off"):
        with vllm_settings(profile=profile, activation="none"):
            toy, layer = gate_up()
        feed(layer, toy, SHARDS)
        outputs[profile] = layer.quant_method.apply(layer, x)
    weight = layout.concat_outputs([c.weight for c in toy.cases.values()])
    matrices = TRANSFORMS[weight.output_transform.long()]
    for profile, thresholds in zip(("3.0", "2.0"), PROFILES, strict=True):
        want = reference.decode_bitplane_ref(x, weight, matrices, thresholds, int8=False)
        assert relative_rms(outputs[profile], want) <= FLOAT32_RMS
    for profile in ("full", "off"):
        assert relative_rms(outputs[profile], reference.linear_ref(x, weight, matrices, int8=False)) <= FLOAT32_RMS
    assert torch.equal(outputs["off"], x @ layer.weight_dense.T)
    assert not torch.equal(outputs["3.0"], outputs["2.0"])


def test_a_profile_changes_on_a_loaded_layer():
    toy, layer = gate_up()
    feed(layer, toy, SHARDS)
    buffer, x = layer.active_thresholds.data_ptr(), make_rows(1, 128)
    results = []
    for profile in ("3.0", "2.0", "full", "3.0"):
        layer.quant_method.set_profile(layer, profile)
        results.append(layer.quant_method.apply(layer, x))
    assert layer.active_thresholds.data_ptr() == buffer
    assert torch.equal(results[0], results[3]) and not torch.equal(results[0], results[1])


def test_dummy_weights():
    with vllm_settings(load_format="dummy"):
        toy, layer = gate_up(bias=True)
        layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.apply(layer, make_rows(2, 128), layer.bias).shape == (2, 256)
    counts = {b: int((layer.graded_tile_bits == b).sum()) for b in (4, 8)}
    want = torch.cat([c.weight.tile_bits.flatten() for c in toy.cases.values()])
    assert counts == {b: int((want == b).sum()) for b in (4, 8)}


def test_inputs_whose_rows_lie_apart():
    toy, layer = gate_up()
    feed(layer, toy, SHARDS)
    for m in (3, 9):
        x = make_rows(m, 128)
        for view in (torch.cat((x, x), 1)[:, :128], x.T.contiguous().T, x[:, None].expand(m, 2, 128).transpose(0, 1)):
            assert not view.is_contiguous()
            want = layer.quant_method.apply(layer, view.contiguous())
            assert torch.equal(layer.quant_method.apply(layer, view), want)


def test_the_op_is_traced_once_for_all_row_counts():
    """A graph traced at many rows must still grade few: the choice is inside the op."""
    toy, layer = gate_up()
    feed(layer, toy, SHARDS)
    graph = torch.compile(lambda x: layer.quant_method.apply(layer, x), backend="eager", fullgraph=True, dynamic=True)
    for m in (20, 9, 8, 2):
        x = make_rows(m, 128)
        assert torch.equal(graph(x), layer.quant_method.apply(layer, x))
    torch.library.opcheck(
        torch.ops.tilequant.tile_linear,
        (
            make_rows(2, 128),
            [layer.weight_dense.data],
            [getattr(layer, name).data for name in layer.tilequant_graded],
            False,
            256,
            None,
            None,
            layer.active_thresholds,
            8,
            "group64",
            "token_smooth",
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_registering_twice():
    import importlib

    from vllm.model_executor.layers.quantization import get_quantization_config

    import vllm_tilequant
    from vllm_tilequant import ops

    vllm_tilequant.register()
    vllm_tilequant.register()
    importlib.reload(ops)
    assert get_quantization_config("tilequant") is TileQuantConfig
