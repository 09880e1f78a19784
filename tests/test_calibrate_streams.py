"""Codes layer by layer: what the linears receive in both streams, the weight that fits it, and rotated inputs."""

import copy

import pytest
import torch
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM

from tiny import VOCAB, llama, records
from vllm_tilequant.calibrate.allocation import allocate, pool
from vllm_tilequant.calibrate.basis import Basis
from vllm_tilequant.calibrate.capture import Group, find_groups, merged, token_mask, watch_gradients
from vllm_tilequant.calibrate.checkpoint import build_schema
from vllm_tilequant.calibrate.moments import Moments
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.scales import InputStatistics, ScaleSearch
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.streams import Streams, find_blocks
from vllm_tilequant.kernels import layout, portable, reference

pytestmark = pytest.mark.calibrate


def padded(batches):
    """The last ten tokens of the first record are padding."""
    first = batches[0]["attention_mask"].clone()
    first[:, -10:] = 0
    return [batches[0] | {"attention_mask": first}, *batches[1:]]


def noisy(model, share=0.05):
    """Another model: a copy whose linears differ a little."""
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, m in other.named_modules():
            if isinstance(m, nn.Linear) and name != "lm_head":
                m.weight += share * m.weight.std() * torch.randn_like(m.weight)
    return other


@torch.no_grad()
def watched(model, names, batches):
    """Inputs and outputs of modules on whole passes: name -> rows without padding, of all batches."""
    seen = {n: ([], []) for n in names}
    mask = None

    def note(name):
        def hook(module, args, output):
            for kept, t in zip(seen[name], (args[0], output[0] if isinstance(output, tuple) else output), strict=True):
                kept.append(t.reshape(-1, t.shape[-1])[mask])

        return hook

    handles = [model.get_submodule(n).register_forward_hook(note(n)) for n in names]
    for batch in batches:
        mask = token_mask(batch).flatten()
        model.model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return {n: tuple(torch.cat(part) for part in both) for n, both in seen.items()}


def test_both_streams_are_those_of_whole_passes():
    model, linears = llama()
    other = noisy(model)
    batches = padded(records(n=3, length=24))
    groups = find_groups(model, linears, batches[0])
    blocks, outside = find_blocks(model, groups)
    assert [b.name for b in blocks] == ["model.layers.0", "model.layers.1"] and not outside
    streams = Streams(model, linears, blocks, batches, follow=True)
    norms = [f"{b.name}.{n}" for b in blocks for n in ("input_layernorm", "post_attention_layernorm")]
    layers = [b.name for b in blocks]
    want, other_want = (watched(m, [*(g.name for g in groups), *norms, *layers], batches) for m in (model, other))
    for block in blocks:
        streams.enter(block)
        for group in block.groups:
            rows = list(streams.rows(group, block))
            source, received = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
            assert torch.allclose(source, want[group.name][0], atol=1e-12)
            assert torch.allclose(received, other_want[group.name][0], atol=1e-12)
            before = {"o_proj": norms[2 * blocks.index(block)], "down_proj": norms[2 * blocks.index(block) + 1]}
            norm = before.get(group.name.rpartition(".")[2])
            if norm is None:
                assert all(r[2] is None for r in rows)
            else:  # the hidden states that the linear's output is added to stand before the norm
                lacking = torch.cat([r[2] for r in rows])
                assert torch.allclose(lacking.double(), want[norm][0] - other_want[norm][0], atol=1e-6)
            for name in group.members:
                streams.install(name, other.get_submodule(name))
        streams.leave(block)
    mask = torch.cat([token_mask(b).flatten() for b in batches])
    for hidden, expected in ((streams.source, want), (streams.quantized, other_want)):
        hidden = torch.cat([h.reshape(-1, h.shape[-1]) for h in hidden])[mask]
        assert torch.allclose(hidden, expected[layers[-1]][1], atol=1e-12)
    assert not any("forward" in vars(m) for m in linears.values())


def test_batches_of_one_length_are_merged_up_to_a_size():
    batches = [*padded(records(n=3, length=24)), *records(n=1, length=30)]
    whole = merged(batches, 48)
    assert [tuple(b["input_ids"].shape) for b in whole] == [(2, 24), (1, 24), (1, 30)]
    assert torch.equal(
        torch.cat([b["input_ids"].flatten() for b in whole]), torch.cat([b["input_ids"].flatten() for b in batches])
    )
    assert int(sum(token_mask(b).sum() for b in whole)) == 3 * 24 + 30 - 10


def test_outputs_that_are_scaled_before_they_are_added_are_not_repaired():
    torch.manual_seed(0)
    config = GraniteConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, residual_multiplier=0.4, initializer_range=0.08,
    )  # fmt: skip
    model = GraniteForCausalLM(config).double().eval()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    blocks, _ = find_blocks(model, find_groups(model, linears, records()[0]))
    streams = Streams(model, linears, blocks, records(), follow=True)
    streams.enter(blocks[0])
    assert all(lacking is None for group in blocks[0].groups for _, _, lacking in streams.rows(group, blocks[0]))


def test_layers_that_do_not_feed_one_another_are_refused_by_name():
    model, linears = llama()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    blocks, _ = find_blocks(model, find_groups(model, linears, records()[0]))
    streams = Streams(model, linears, blocks, records(), follow=False)
    streams.enter(blocks[0])
    streams.leave(blocks[0])
    with pytest.raises(ValueError, match="model.layers.1 does not receive what the layer before it returns"):
        streams.enter(blocks[1])


def test_the_target_weight_is_the_least_squares_solution():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, generator=g)
    z = x + 0.3 * torch.randn(500, 64, generator=g)
    w, r = torch.randn(8, 64, generator=g), torch.randn(500, 8, generator=g)
    moments = Moments.empty(64, x.device)
    for part in (slice(0, 200), slice(200, 500)):
        moments.add(x[part], z[part], r[part])
    want = torch.linalg.lstsq(z.double(), (x @ w.T + r).double()).solution.T
    assert torch.allclose(moments.target(w, moments.lacking, 1.0, 1e-12).double(), want, atol=1e-4)
    half = moments.target(w, moments.lacking, 0.5, 1e-12).double()
    assert torch.allclose(half, (want + w.double()) / 2, atol=1e-4)
    assert moments.target(w, moments.lacking, 0.0, 0.01) is w
    same = Moments.empty(64, x.device)
    same.add(x, x, None)
    assert same.shift is None and same.target(w, None, 1.0, 0.01) is w


def output_error(result, model, batches):
    """Squared error of the last hidden states, every linear at stored precision, and with the default thresholds."""
    dense, transforms = copy.deepcopy(model), layout.transform_stack(result.transforms)
    want = torch.cat([model.model(**b).last_hidden_state for b in batches])
    for name, packed in result.weights.items():
        dense.get_submodule(name).weight.copy_(portable.dequantize(packed, transforms, torch.float64))
    return float((torch.cat([dense.model(**b).last_hidden_state for b in batches]) - want).square().mean())


@torch.no_grad()
def test_propagation_makes_up_for_what_earlier_layers_get_wrong():
    batches = records(n=8, length=64)
    errors = {}
    for propagation in ("off", "static"):
        model, linears = llama()
        settings = Settings(max_bits=4, propagation=propagation, propagation_strength=1.0, profiles={"3.0": 3.0})
        errors[propagation] = output_error(Calibration(model, linears, batches, settings).run(), model, batches)
    assert errors["static"] < 0.9 * errors["off"]


@pytest.mark.parametrize("rotation,propagation", [("on", "static"), ("on", "off"), ("off", "graded"), ("on", "graded")])
def test_a_rotated_or_graded_run_gives_codes_for_what_it_says(rotation, propagation):
    model, linears = llama()
    settings = Settings(input_rotation=rotation, propagation=propagation, scores="joint", score_samples=2)
    run = Calibration(model, linears, records(n=4), settings)
    result = run.run()
    schema = build_schema(result, linears, list(settings.profiles), "3.0", ["lm_head"])
    rotated = rotation == "on"
    assert schema.required_features == (["input_transform"] if rotated else [])
    assert {schema.input_transform(n) is not None for n in linears} == {rotated}
    transforms = layout.transform_stack(result.transforms)
    for name, linear in linears.items():
        packed = result.weights[name]
        assert (packed.input_rotation is not None) == rotated
        back = portable.dequantize(packed, transforms, torch.float64)
        # in another basis than the source's the error would be as large as the weight
        assert float((back - linear.weight.detach()).norm() / linear.weight.detach().norm()) < 0.6
    group = run.groups[0]
    x = torch.cat([b["input_ids"] for b in records(n=4)])
    rows = model.model.embed_tokens(x).reshape(-1, 128).float()
    seen = run.basis.inputs(group.name, rows)
    assert torch.equal(seen, layout.rotate_inputs(rows, packed.input_rotation)) if rotated else seen is rows
    levels = reference.levels_ref(seen, result.thresholds[group.name][1])
    assert 0 < float((levels > 0).float().mean()) <= 1


def test_auto_rotates_where_the_expected_error_is_lower():
    """Inputs with rare giants: rotating them helps what is read at stored precision, and spoils grading."""
    torch.manual_seed(0)
    linear = nn.Linear(128, 128, bias=False)
    x = torch.randn(2000, 128) * torch.where(torch.arange(128) % 16 == 0, 30.0, 0.3)
    group = Group("l", ("l",))
    for default, rotated in (("off", None), ("3.0", False)):
        settings = Settings(input_rotation="auto", default_profile=default, scales="mse", output_transform="none")
        basis = Basis({"l": linear}, settings, {"l": "l"})
        inputs = {"l": {f: InputStatistics.empty(128) for f in (False, True)}}
        for form, statistics in inputs["l"].items():
            statistics.add_record(basis.turned(x) if form else x)
        search = ScaleSearch(basis, inputs, len(x), 0.6)
        search.search(group)
        errors = search.errors["l"]
        assert ("l" in basis.rotated) == (errors["on"] < errors["off"]) and list(inputs["l"]) == ["l" in basis.rotated]
        if rotated is not None:
            assert ("l" in basis.rotated) == rotated


def test_maps_of_whole_units_keep_the_budget():
    g = torch.Generator().manual_seed(0)
    scores = {"a": torch.rand(4, 6, generator=g) + 0.1, "b": torch.rand(2, 3, generator=g) + 0.1}
    for unit, axis in (("row", 1), ("column", 0), ("module", None), ("tile", None)):
        bits = allocate(pool(scores, unit), 15)
        assert sum(int((b == 4).sum()) for b in bits.values()) == 15
        if axis is not None:  # at most one unit of the whole model is cut by the budget
            mixed = sum(int(((b == 4).any(axis) & (b == 8).any(axis)).sum()) for b in bits.values())
            assert mixed <= 1
    whole = allocate(pool(scores, "module"), 6)
    lowest = min(scores, key=lambda n: float(scores[n].mean()))
    assert int((whole[lowest] == 4).sum()) == 6


def test_gradients_layer_by_layer_are_those_of_the_whole_graph():
    model, linears = llama()
    blocks, _ = find_blocks(model, find_groups(model, linears, records()[0]))
    batches = padded(records(n=2, length=24))
    found = []
    for layers in ((), [b.module for b in blocks]):
        seen = {}
        watch_gradients(model, linears, batches, lambda name, *t, seen=seen: seen.setdefault(name, []).append(t), layers)
        found.append(seen)
    whole, by_layer = found
    assert set(whole) == set(by_layer) == set(linears)
    for name in linears:
        for (x, g), (x2, g2) in zip(whole[name], by_layer[name], strict=True):
            assert torch.allclose(x, x2, atol=1e-12) and torch.allclose(g, g2, atol=1e-10)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any("forward" in vars(m) for m in model.modules())


def test_layers_that_do_not_feed_one_another_are_differentiated_as_a_whole():
    model, linears = llama()
    blocks, _ = find_blocks(model, find_groups(model, linears, records()[0]))
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    seen = []
    watch_gradients(model, linears, records(n=1), lambda name, x, g: seen.append(name), [b.module for b in blocks])
    assert sorted(seen) == sorted(linears)
