"""Each step of a calibration against a plain float64 computation."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from cases import make_map
from tiny import llama, records
from vllm_tilequant.calibrate import quantize
from vllm_tilequant.calibrate.allocation import allocate
from vllm_tilequant.calibrate.capture import find_groups, watch_gradients, watch_inputs
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.sensitivity import rotate_gradient, tile_scores
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.thresholds import (
    GroupStatistics,
    Histogram,
    level_ratios,
    optimal_thresholds,
    percentile_thresholds,
)
from vllm_tilequant.kernels import layout, reference
from vllm_tilequant.schema import LEVELS, NEVER, Transform

pytestmark = pytest.mark.calibrate


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_map(n, k, seed=0):
    return make_map("mixed48", n // 64, k // 64, torch.Generator().manual_seed(seed))


# ---- scales and codes


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_searched_scales_are_the_best_of_their_grid(bits):
    w, h = randn(64, 128), randn(128, seed=1).square() + 0.1
    found = quantize.search_scale(w, bits, h, nested=False)
    base = quantize.absmax_scale(w, bits)
    low, high = quantize.code_range(bits)

    def error(scale, kt):
        t = w[:, 64 * kt : 64 * kt + 64].double()
        q = (t / scale).round().clamp(low, high)
        return float((h[64 * kt : 64 * kt + 64] * (t - scale * q).square()).sum())

    for kt in range(2):
        everything = [float(base[0, kt]) * (0.25 + i / 128) for i in range(129)]
        assert error(float(found[0, kt]), kt) <= 1.02 * min(error(s, kt) for s in everything)
        assert error(float(found[0, kt]), kt) <= error(float(base[0, kt]), kt)


@pytest.mark.parametrize("bits", [6, 8])
def test_nested_scales_weigh_the_error_of_the_codes_read_at_four_bits(bits):
    w, h = randn(64, 64), randn(64, seed=1).square() + 0.1
    base = quantize.absmax_scale(w, bits)
    low, high = quantize.code_range(bits)

    def error(scale):
        q = (w.double() / scale).round().clamp(low, high)
        drop = 2.0 ** (bits - 4)
        read = (q / drop).floor() * drop + (drop - 1) / 2
        return float(sum(f * (h * (w - scale * v).square()).sum() for f, v in ((0.9, q), (0.1, read))))

    found = float(quantize.search_scale(w, bits, h, nested=True)[0, 0])
    assert error(found) <= 1.02 * min(error(float(base) * (0.25 + i / 128)) for i in range(129))


def test_tiles_of_zeros_and_denormals_give_finite_scales_and_exact_zeros():
    w = torch.cat([torch.zeros(64, 64), torch.full((64, 64), 1e-42), torch.full((64, 64), 0.5)], 1)
    for bits in (4, 6, 8):
        for scale in (quantize.absmax_scale(w, bits), quantize.search_scale(w, bits, None, nested=bits > 4)):
            assert bool((scale.isfinite() & (scale > 0)).all())
            tile_bits = torch.full((1, 3), bits, dtype=torch.uint8)
            back = quantize.read_at(quantize.round_to_nearest(w, scale, tile_bits), scale, tile_bits, bits)
            assert not back[:, :128].any() and torch.allclose(back[:, 128:], w[:, 128:], rtol=0.2)


def test_reads_at_every_level_equal_the_reference():
    w, bits = randn(128, 192), random_map(128, 192)
    scale = torch.where(bits == 4, quantize.absmax_scale(w, 4), quantize.absmax_scale(w, 8))
    q = quantize.round_to_nearest(w, scale, bits)
    packed = layout.pack(quantize.to_unsigned(q, bits), bits, scale, torch.zeros(2, dtype=torch.uint8))
    for level in LEVELS[1:]:
        got = quantize.read_at(q, scale, bits, level).double()
        want = reference.level_weight_ref(packed, level)
        assert (got - want).abs().max() <= 2**-22 * want.abs().max()


def plain_gptq(w, scale, bits, h, damping):
    """GPTQ column by column in float64 with the whole inverse Hessian, updated by elimination."""
    w, h = w.double().clone(), h.double().clone()
    h += damping * h.diagonal().mean() * torch.eye(h.shape[0], dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    q = torch.zeros_like(w)
    half = layout.expand_tiles(2.0 ** (bits.double() - 1))
    s = layout.expand_tiles(scale.double())
    for i in range(w.shape[1]):
        q[:, i] = torch.minimum(torch.maximum((w[:, i] / s[:, i]).round(), -half[:, i]), half[:, i] - 1)
        e = (w[:, i] - q[:, i] * s[:, i]) / inverse[i, i]
        w -= e[:, None] * inverse[i][None, :]
        inverse = inverse - inverse[:, i : i + 1] * inverse[i : i + 1, :] / inverse[i, i]
    return q


def test_gptq_under_a_map_equals_the_plain_algorithm():
    w, bits, x = randn(128, 192), random_map(128, 192), randn(400, 192, seed=2) * randn(192, seed=3).exp()
    scale = torch.where(bits == 4, quantize.absmax_scale(w, 4) * 0.7, quantize.absmax_scale(w, 8))
    h = x.T @ x
    got = quantize.gptq(w, scale, bits, h, 0.01)
    want = plain_gptq(w, scale, bits, h, 0.01)
    # A rounding decision on a tie may fall differently in float32, and what follows it then differs too.
    assert float((got.double() != want).double().mean()) < 0.01
    rtn = quantize.round_to_nearest(w, scale, bits)

    def loss(q):
        return float((x @ (w - quantize.read_at(q, scale, bits, 8)).T).square().sum())

    assert loss(got) < 0.7 * loss(rtn)
    half = layout.expand_tiles(2.0 ** (bits.float() - 1))
    assert bool(((got >= -half) & (got < half)).all())


def test_level_errors_are_sums_over_outputs_and_means_over_inputs():
    w, bits, f = randn(64, 128), random_map(64, 128), randn(64, seed=5).square()
    scale = torch.where(bits == 4, quantize.absmax_scale(w, 4), quantize.absmax_scale(w, 8))
    q = quantize.round_to_nearest(w, scale, bits)
    got = quantize.level_errors(w, q, scale, bits, f)
    for i, level in enumerate(LEVELS):
        read = torch.zeros_like(w) if level == 0 else quantize.read_at(q, scale, bits, level)
        assert math.isclose(float(got[i]), float(((w - read).double().square().mean(1) * f).sum()), rel_tol=1e-5)
    assert bool((got[1:] <= got[:-1] * 1.0001).all())


# ---- scores and the map


def test_tile_scores_equal_the_formula_written_out():
    n, k, m = 128, 192, 7
    x, g, delta = randn(m, k), randn(m, n, seed=1), randn(n, k, seed=2)
    u = layout.transform_matrix(Transform(kind="randomized_hadamard", seed=3))
    q, s = reference.activation_int8_ref(x)
    xh = (q.view(m, -1, 64).double() * s.double()[..., None]).view(m, k)
    got = tile_scores(x, rotate_gradient(g, u.float()), delta)
    for j in range(n // 64):
        for t in range(k // 64):
            want = 0.0
            for row in range(m):
                gj = g[row, 64 * j : 64 * j + 64].double() @ u
                change = delta[64 * j : 64 * j + 64, 64 * t : 64 * t + 64].double() @ xh[row, 64 * t : 64 * t + 64]
                want += 0.5 * float((gj * change).square().sum())
            assert math.isclose(float(got[j, t]), want, rel_tol=1e-4)


def test_the_budget_is_model_wide_and_ties_are_broken_in_order():
    scores = {"b": torch.tensor([[3.0, 1.0]]), "a": torch.tensor([[1.0, 1.0], [9.0, 2.0]])}
    tile_bits = allocate(scores, 3)
    assert tile_bits["b"].tolist() == [[8, 4]] and tile_bits["a"].tolist() == [[4, 4], [8, 8]]
    assert all(bool((m == 8).all()) for m in allocate(scores, 0).values())
    assert all(bool((m == 4).all()) for m in allocate(scores, 6).values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scores_that_make_no_sense_stop_with_the_module_name(value):
    with pytest.raises(ValueError, match=r"\['x.bad'\]"):
        allocate({"ok": torch.ones(1, 1), "x.bad": torch.tensor([[1.0, value]])}, 1)
    with pytest.raises(ValueError, match=r"\['x.zero'\]"):
        allocate({"x.zero": torch.zeros(2, 2)}, 1)


# ---- thresholds


def statistics(k=256, n=512, seed=0, errors=(1.0, 0.2, 0.02, 0.001, 0.0), spread=1.0):
    tile_bits = random_map(n, k, seed)
    histogram = Histogram(k)
    rows = []
    for record in range(4):
        x = randn(64, k, seed=seed * 10 + record) * (spread * randn(k, seed=seed)).exp()
        histogram.add_record(x)
        rows.append(x)
    stats = GroupStatistics(histogram, torch.tensor(errors, dtype=torch.float64), layout.level_cost(tile_bits), n * k)
    return stats, torch.cat(rows), tile_bits


def loaded(x, thresholds, tile_bits):
    levels = reference.levels_ref(x, thresholds)
    return float(layout.loaded_code_bits(levels, tile_bits).mean()) / (tile_bits.numel() * 4096)


@pytest.mark.parametrize("target", [1.0, 2.5, 3.0, 4.0, 5.0])
def test_one_lambda_meets_the_average_over_all_groups(target):
    parts = {f"g{i}": statistics(k=256, n=512 * (i + 1), seed=i, spread=0.5 + i) for i in range(3)}
    found = optimal_thresholds({n: p[0] for n, p in parts.items()}, target)
    weights = {n: p[0].weights for n, p in parts.items()}
    average = sum(loaded(p[1], found[n], p[2]) * weights[n] for n, p in parts.items()) / sum(weights.values())
    assert abs(average - target) < 0.02
    for t in found.values():
        assert bool(t.isfinite().all()) and bool((t[1:] >= t[:-1]).all())


def test_a_target_above_what_is_stored_is_refused():
    stats, _, tile_bits = statistics()
    with pytest.raises(ValueError, match="cannot be reached"):
        optimal_thresholds({"g": stats}, 7.9)


def test_thresholds_are_optimal_for_their_price():
    """No single channel can improve error + lambda * bits by another level."""
    bits = torch.tensor([0.0, 2, 4, 5.2, 6.4], dtype=torch.float64)
    errors = torch.tensor([1.0, 0.3, 0.02, 0.004, 0.001], dtype=torch.float64)
    ratios = level_ratios(bits, errors)
    for lam in (0.01, 1.0):
        theta = ratios * math.sqrt(lam)
        for x in torch.linspace(0.001, 60, 500).tolist():
            level = int((x > theta).sum())
            cost = [float(errors[b]) * x * x + lam * float(bits[b]) for b in range(5)]
            assert cost[level] <= min(cost) * (1 + 1e-9)


def test_levels_off_the_hull_or_without_gain_are_skipped():
    ratios = level_ratios(torch.tensor([0.0, 2, 4, 6, 8]), torch.tensor([1.0, 0.9, 0.1, 0.05, 0.05]))
    assert ratios[0] == ratios[1] < ratios[2] and ratios[3] == math.inf
    four = level_ratios(torch.tensor([0.0, 2, 4, 4, 4]), torch.tensor([1.0, 0.2, 0.1, 0.1, 0.1]))
    assert bool(four[:2].isfinite().all()) and bool((four[2:] == math.inf).all())


def test_percentile_thresholds_give_the_wanted_shares():
    stats, x, _ = statistics()
    shares = [0.25, 0.19, 0.37, 0.19, 0.0]
    t = percentile_thresholds({"g": stats}, shares)["g"]
    levels = reference.levels_ref(x, t)
    for level, share in zip(LEVELS, shares, strict=True):
        assert abs(float((levels == level).double().mean()) - share) < 0.02
    assert t[3] == pytest.approx(NEVER)


# ---- settings


def test_settings_are_validated():
    assert Settings().default_profile == "3.0"
    assert list(Settings().profiles) == ["2.5", "3.0", "3.5", "4.0", "5.0"]
    for fewer in ({"w4_fraction": 0.8}, {"stored_bits": 4.9}, {"max_bits": 6}):
        assert list(Settings(**fewer).profiles) == ["2.5", "3.0", "3.5", "4.0"]
    assert list(Settings(max_bits=4).profiles) == ["2.5", "3.0", "3.5"]
    assert (Settings().w4_share, Settings(w4_fraction=0.0).w4_share, Settings(max_bits=4).w4_share) == (0.6, 0.0, 1.0)
    for wrong, message in (
        ({"w4_fraction": 1.5}, "w4_fraction"),
        ({"profiles": {"off": 3.0}}, "'full' or 'off'"),
        ({"profiles": {"3.0": 3.0, "two words": 2.5}}, "letters, digits"),
        ({"default_profile": "7"}, "default_profile '7'"),
        ({"profiles": {"3.0": [0.5, 0.5, 0, 0, 0]}}, "average of loaded bits"),
        ({"thresholds": "percentile", "profiles": {"3.0": [0.5, 0.6, 0, 0, 0]}}, "sum to 1"),
        ({"thresholds": "table3"}, "'8-17', got 2.5"),
        ({"thresholds": "table3", "profiles": {"3.0": "8-61"}}, "8-1 to 8-60, 6-1 to 6-60, 4-1 to 4-52"),
        ({"thresholds": "search", "profiles": {"3.0": "8-1"}}, "average of loaded bits"),
        ({"max_bits": 4, "profiles": {"3.0": 5.0}}, r"loaded bits in \(0, 4\]"),
        ({"codes": "awq"}, "codes"),
        ({"w4_fraction": 0.5, "stored_bits": 5.0}, "give one of them"),
        ({"max_bits": 4, "w4_fraction": 0.5}, "every tile 4-bit"),
        ({"max_bits": 5}, "max_bits"),
        ({"scores": "weights"}, "scores"),
        ({"score_steps": 0}, "score_steps"),
        ({"output_seeds": 0}, "output_seeds"),
        ({"unknown": 1}, "unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)


def test_the_recipes_that_come_with_the_package_are_valid_and_the_default_one_is_the_default():
    folder = Path(__file__).parents[1] / "configs" / "recipes"
    recipes = {f.stem: yaml.safe_load(f.read_text()) for f in folder.glob("*.yaml")}
    assert {"default", "w4-80", "w4", "w8", "w8-graded"} == set(recipes)
    for fields in (*recipes.values(), *(yaml.safe_load(f.read_text()) for f in folder.glob("controls/*.yaml"))):
        Settings(**fields)
    default = recipes["default"]
    assert default.pop("w4_fraction") == Settings().w4_share
    assert default == {name: getattr(Settings(), name) for name in default}


# ---- watching a model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return x + self.o(torch.tanh(self.q(x)) * self.k(x))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(50, 64), Block(), nn.Linear(64, 50, bias=False)

    @property
    def base_model(self):
        return self

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        return type("Out", (), {"logits": self.head(self.block(self.embed(input_ids)))})


def tiny():
    model = Tiny()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head"}
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    return model, linears, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_linears_that_share_an_input_form_a_group():
    model, linears, batch = tiny()
    groups = find_groups(model, linears, batch)
    assert [(g.name, g.members) for g in groups] == [("block.q", ("block.q", "block.k")), ("block.o", ("block.o",))]


def test_padding_is_neither_row_nor_target():
    model, linears, batch = tiny()
    whole, padded = {}, {}

    def sink(out):
        return lambda name, *t: out.setdefault(name, []).append(t)

    watch_inputs(model, linears, [batch], sink(whole))
    watch_gradients(model, linears, [batch], sink(whole))
    ids = torch.cat([batch["input_ids"], torch.full((2, 5), 7)], 1)
    mask = torch.cat([batch["attention_mask"], torch.zeros(2, 5, dtype=torch.int64)], 1)
    watch_inputs(model, linears, [{"input_ids": ids, "attention_mask": mask}], sink(padded))
    watch_gradients(model, linears, [{"input_ids": ids, "attention_mask": mask}], sink(padded))
    for name, calls in whole.items():
        for a, b in zip(calls, padded[name], strict=True):
            for s, t in zip(a, b, strict=True):
                assert torch.allclose(s, t, atol=1e-6)


def test_gradients_are_those_of_autograd_and_no_weight_gets_one():
    model, linears, batch = tiny()
    outer = {}

    def use(name, x, g):
        outer[name] = g.T @ x

    watch_gradients(model, linears, [batch], use)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    logits = model(**batch).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")
    loss.backward()
    for name, linear in linears.items():
        assert torch.allclose(outer[name], linear.weight.grad, atol=1e-4)


def test_a_gradient_or_loss_that_is_not_finite_is_named():
    model, linears, batch = tiny()
    handle = linears["block.o"].register_forward_hook(
        lambda m, args, out: out.register_hook(lambda g: g * float("nan")) and None
    )
    with pytest.raises(ValueError, match="gradient at block.o is not finite"):
        watch_gradients(model, linears, [batch], lambda *a: None)
    handle.remove()
    linears["block.o"].register_forward_hook(lambda m, args, out: out * float("nan"))
    with pytest.raises(ValueError, match="loss is not finite"):
        watch_gradients(model, linears, [batch], lambda *a: None)


@pytest.mark.parametrize("nested", [True, False])
def test_nested_scales_are_a_choice_for_wide_tiles(nested):
    model, linears = llama(torch.float32)
    run = Calibration(model, linears, records(), Settings(codes="rtn", scores="activation", nested_scales=nested))
    run.run()
    name = "model.layers.0.mlp.up_proj"
    w, h = run.basis.weight(name), run._channel_weight(name)
    for bits in (4, 8):
        assert torch.equal(run.scales[name][bits], quantize.search_scale(w, bits, h, nested=nested and bits == 8))
    other = quantize.search_scale(w, 8, h, nested=not nested)
    assert not torch.equal(run.scales[name][8], other)
