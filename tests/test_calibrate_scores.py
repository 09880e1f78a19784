"""Tile scores of both phases on a tiny Llama, each against a second computation in float64 from the same definitions."""

import math

import pytest
import torch
from torch import nn

from tiny import llama, records
from vllm_tilequant.calibrate import capture, decode, quantize, sensitivity
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.thresholds import GroupStatistics, Histogram, optimal_thresholds
from vllm_tilequant.kernels import layout, portable, reference
from vllm_tilequant.schema import TILE

pytestmark = pytest.mark.calibrate


@pytest.fixture(scope="module")
def scored():
    """A run up to the map, with what it hands to the decode phase."""
    model, linears = llama()
    run = Calibration(model, linears, records(), Settings(scores="joint", codes="rtn"))
    seen = {}
    original = sensitivity.decode_scores

    def spy(model, linears, batches, deltas, weights, thresholds, **how):
        out = original(model, linears, batches, deltas, weights, thresholds, **how)
        seen.update(deltas=dict(deltas), weights=weights, thresholds=thresholds, decode=out)
        return out

    patch = pytest.MonkeyPatch()
    patch.setattr(sensitivity, "decode_scores", spy)
    run.run()
    patch.undo()
    return run, seen


def plain_product(x, run, seen, name):
    """The graded product in float64: sum over channels of INT8 x times the 8-bit code's leading bits plus the midpoint."""
    w = seen["weights"][name]
    q, s = reference.activation_int8_ref(x)
    levels = reference.levels_ref(x, seen["thresholds"][name]).long()
    x_hat = (q.double().view(x.shape[0], -1, TILE) * s.double()[..., None]).view(x.shape)
    u = w.codes.double()  # [K, N]
    scale = layout.expand_tiles(w.tile_scale.double()).T
    y = torch.zeros(x.shape[0], u.shape[1], dtype=torch.float64)
    for row in range(x.shape[0]):
        d = (8 - levels[row])[:, None].double()
        value = scale * (2**d * (u / 2**d).floor() + (2**d - 1) / 2 - 128)
        value[levels[row] == 0] = 0
        y[row] = x_hat[row] @ value
    u_matrix = run.basis.matrices[0]
    return (y.view(x.shape[0], -1, TILE) @ u_matrix.T).view(x.shape[0], -1)


def plain_scores(x_hat, gradient, delta, matrix):
    """R_jk = 1/2 sum over rows and outputs of ((g_j U) * (D_jk x_k))^2, tile by tile."""
    n, k = delta.shape
    out = torch.zeros(n // TILE, k // TILE, dtype=torch.float64)
    for j in range(n // TILE):
        for t in range(k // TILE):
            g = gradient[:, TILE * j : TILE * (j + 1)] @ matrix
            d = delta[TILE * j : TILE * (j + 1), TILE * t : TILE * (t + 1)]
            out[j, t] = 0.5 * (g * (x_hat[:, TILE * t : TILE * (t + 1)] @ d.T)).square().sum()
    return out


def int8(x):
    q, s = reference.activation_int8_ref(x)
    return (q.double().view(x.shape[0], -1, TILE) * s.double()[..., None]).view(x.shape)


class Product(torch.autograd.Function):
    """Some value, with the gradient of x times the weight."""

    @staticmethod
    def forward(ctx, x, weight, value):
        ctx.save_for_backward(weight)
        return value

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.saved_tensors[0], None, None


def plain_step(ids, first, at, run, seen):
    """One scored step without cache or hooks: rows from `first` on are graded, only row `at` has a gradient.

    -> module -> (input [1, K], output gradient [1, N])
    """
    model, linears = llama()
    kept = {}

    def graded(name, m):
        def forward(x):
            rows = x.detach()
            y = (rows @ m.weight.T)[0]
            y[first:] = plain_product(rows[0, first:], run, seen, name)
            last = Product.apply(x[:, at:], m.weight, y[None, at:])
            last.register_hook(lambda g: kept.update({name: (rows[0, at:], g[0])}))
            return torch.cat([y[None, :at], last], 1)

        return forward

    for name, m in linears.items():
        m.weight.requires_grad_(False)
        m.forward = graded(name, m)
    logits = model(input_ids=ids[:, : at + 1], use_cache=False).logits
    nn.functional.cross_entropy(logits[:, -1], ids[:, at + 1]).backward()
    return kept


def test_decode_scores_equal_a_plain_computation(scored):
    run, seen = scored
    want = {n: torch.zeros_like(s) for n, s in seen["decode"].items()}
    for batch in run.batches:
        ids = batch["input_ids"]
        first, positions = decode.decode_steps(ids.shape[1], 4)
        assert (first, positions) == (19, [23, 28, 33, 38])  # length 40: 20 tokens decoded, their last one at 38
        for at in positions:
            for name, (x, g) in plain_step(ids, first, at, run, seen).items():
                x_hat = int8(x).where(x.abs() > seen["thresholds"][name][0], 0.0)
                want[name] += plain_scores(x_hat, g, seen["deltas"][name].double(), run.basis.matrices[0])
    for name, r in want.items():
        assert float(r.min()) > 0
        assert torch.allclose(seen["decode"][name], r, rtol=2e-3), name


def test_provisional_thresholds_meet_three_bits_with_wide_tiles_everywhere(scored):
    run, seen = scored
    loaded = weights = 0.0
    for name, linear in run.linears.items():
        group = run.basis.group_of[name]
        t = seen["thresholds"][name]
        assert bool((seen["weights"][name].tile_bits == 8).all())
        counts = run.inputs[group][False].histogram.tiles.sum(0).double()
        edges = torch.exp2(torch.arange(counts.numel()) / 64 - 24)
        share = [float(counts[edges >= x].sum() / counts.sum()) for x in t.tolist()]
        loaded += 2 * sum(share) * linear.weight.numel()
        weights += linear.weight.numel()
    assert abs(loaded / weights - 3.0) < 0.05


def test_joint_risk_is_the_greater_share_of_the_two_phases(scored):
    run, seen = scored
    model, linears = llama()
    matrices = {n: run.basis.matrices[0].float().expand(m.out_features // TILE, -1, -1) for n, m in linears.items()}
    prefill, _ = sensitivity.prefill_scores(model, linears, run.batches, matrices, seen["deltas"])
    risk = sensitivity.combine([prefill, seen["decode"]])
    totals = [sum(float(r.sum()) for r in s.values()) for s in (prefill, seen["decode"])]
    for name, r in risk.items():
        want = torch.maximum(prefill[name] / totals[0], seen["decode"][name] / totals[1])
        assert torch.allclose(r, want, rtol=1e-12)
        assert math.isclose(run.report["score_mass"][name], float(want.sum()), rel_tol=1e-4)
    flat = torch.cat([r.flatten() for r in risk.values()])
    narrow = torch.cat([run.tile_bits[n].flatten() == 4 for n in risk])
    assert int(narrow.sum()) == round(0.6 * flat.numel()) and float(flat[narrow].max()) <= float(flat[~narrow].min())


def test_prefill_scores_equal_a_plain_computation(scored):
    run, seen = scored
    model, linears = llama()
    want = {}
    outputs = {}
    for name, m in linears.items():
        m.register_forward_hook(lambda m, args, y, name=name: (y.retain_grad(), outputs.update({name: (args[0], y)}))[1])
    for batch in run.batches:
        ids = batch["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        for name, (x, y) in outputs.items():
            r = plain_scores(int8(x[0].detach()), y.grad[0], seen["deltas"][name].double(), run.basis.matrices[0])
            want[name] = want.get(name, 0) + r
    model, linears = llama()
    matrices = {n: run.basis.matrices[0].float().expand(m.out_features // TILE, -1, -1) for n, m in linears.items()}
    got, _ = sensitivity.prefill_scores(model, linears, run.batches, matrices, seen["deltas"])
    for name, r in want.items():
        assert torch.allclose(got[name], r, rtol=1e-3), name


def test_activation_scores_are_squared_errors_weighted_with_the_inputs():
    g = torch.Generator().manual_seed(0)
    delta, squares = torch.randn(128, 192, generator=g), torch.rand(192, generator=g)
    got = sensitivity.activation_scores({"a": delta}, lambda name: squares)["a"]
    for j in range(2):
        for t in range(3):
            tile = delta[64 * j : 64 * j + 64, 64 * t : 64 * t + 64].double()
            want = float((tile.square() * squares[64 * t : 64 * t + 64].double()).sum())
            assert math.isclose(float(got[j, t]), want, rel_tol=1e-5)


@pytest.mark.parametrize("scores", ["joint", "prefill", "decode", "activation", "random"])
def test_every_kind_of_score_gives_a_map_of_the_wanted_size(scores):
    model, linears = llama(torch.float32)
    run = Calibration(model, linears, records(1), Settings(scores=scores, codes="rtn", w4_fraction=0.5))
    run.run()
    tiles = torch.cat([b.flatten() for b in run.tile_bits.values()])
    assert int((tiles == 4).sum()) == round(0.5 * tiles.numel()) and set(tiles.tolist()) == {4, 8}
    mass = sum(run.report["score_mass"].values())
    assert 1 < mass < 2 if scores == "joint" else math.isclose(mass, 1.0, rel_tol=1e-9)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_padding_and_the_batch_do_not_change_decode_scores():
    model, linears = llama(torch.float32)
    weights, thresholds, deltas = {}, {}, {}
    for name, m in linears.items():
        bits = torch.full((m.out_features // TILE, m.in_features // TILE), 8, dtype=torch.uint8)
        scale = quantize.absmax_scale(m.weight.detach(), 8)
        q = quantize.round_to_nearest(m.weight.detach(), scale, bits)
        eye = torch.eye(TILE).expand(m.out_features // TILE, -1, -1)
        weights[name] = portable.PortableWeight(quantize.to_unsigned(q, bits).T.contiguous(), bits, scale, eye)
        thresholds[name] = torch.tensor([0.02, 0.1, 0.4, 1.0])
        deltas[name] = torch.randn(m.weight.shape, generator=torch.Generator().manual_seed(3))
    one, two = (b["input_ids"] for b in records(2))

    def run(batches):
        return sensitivity.decode_scores(model, linears, batches, deltas, weights, thresholds, scored=2)

    alone = run([{"input_ids": one}, {"input_ids": two[:, :24]}])
    padded = torch.cat([two[:, :24], torch.zeros(1, 16, dtype=torch.int64)], 1)
    mask = torch.tensor([[1] * 40, [1] * 24 + [0] * 16])
    together = run([{"input_ids": torch.cat([one, padded]), "attention_mask": mask}])
    for name in linears:
        assert torch.allclose(alone[name], together[name], rtol=1e-6)


def test_records_too_short_for_a_decode_step_are_refused():
    assert decode.decode_steps(3, 4) == (1, [1])
    assert decode.decode_steps(512, 4) == (479, [486, 494, 502, 510])
    with pytest.raises(ValueError, match="at least 3 tokens, got one of 2"):
        decode.decode_steps(2, 4)


# ---- level errors and transforms


def test_level_errors_can_be_measured_against_the_stored_weight():
    model, linears = llama(torch.float32)
    found = {}
    for kind in ("source", "stored"):
        run = Calibration(model, linears, records(1), Settings(level_errors=kind, w4_fraction=0.0))
        run.run()
        found[kind] = {n: s.errors for n, s in run.statistics.items()}
    for name, errors in found["stored"].items():
        assert float(errors[4]) == 0.0 < float(found["source"][name][4])
        assert math.isclose(float(errors[1]), float(found["source"][name][1]), rel_tol=0.05)


def test_the_best_transform_has_the_least_weighted_error_per_output_tile():
    model, linears = llama(torch.float32)
    with torch.no_grad():
        for i, m in enumerate(linears.values()):  # outliers in single rows, so that the seeds differ
            m.weight[(7 * i) % 64] *= 6
    run = Calibration(model, linears, records(1), Settings(output_transform="best", output_seeds=3, output_seed=5, codes="rtn"))
    result = run.run()
    assert [t.seed for t in result.transforms] == [5, 6, 7]
    used = set()
    for name, m in linears.items():
        h = run._channel_weight(name).double()
        for j, chosen in enumerate(result.weights[name].output_transform.tolist()):
            errors = []
            for matrix in run.basis.matrices:
                w = (matrix.T @ m.weight[64 * j : 64 * j + 64].detach().double()).float()
                s = quantize.search_scale(w, 4, h.float(), nested=False)
                q = quantize.round_to_nearest(w, s, torch.full_like(s, 4, dtype=torch.uint8))
                errors.append(float(((w - quantize.read_at(q, s, torch.full_like(s, 4), 4)).double().square() * h).sum()))
            assert errors[chosen] <= min(errors) * (1 + 1e-4)
            used.add(chosen)
        back = portable.dequantize(result.weights[name], run.basis.matrices, torch.float32)
        assert float((back - m.weight.detach()).norm() / m.weight.detach().norm()) < 0.2
    assert len(used) > 1


# ---- a group's statistics stand in for real rows


def test_provisional_statistics_use_the_histogram_of_the_group(scored):
    run, _ = scored
    group = run.groups[0]
    assert isinstance(run.statistics[group.name], GroupStatistics)
    assert isinstance(run.inputs[group.name][False].histogram, Histogram)
    assert optimal_thresholds({group.name: run.statistics[group.name]}, 2.0)[group.name].shape == (4,)


@pytest.mark.parametrize("scored_steps", [1, 4])
def test_decode_scores_layer_by_layer_are_those_of_one_graph(scored, scored_steps, monkeypatch):
    """As on a GPU that cannot hold all weights: each layer runs twice, the cache between them as it was."""
    run, seen = scored
    model, linears = llama()
    again, backward = [], capture.LayerCall.backward
    monkeypatch.setattr(capture.LayerCall, "backward", lambda call: again.append(call.layer) or backward(call))
    found = []
    for layers in ((), list(model.model.layers)):
        found.append(
            sensitivity.decode_scores(
                model,
                linears,
                run.batches,
                seen["deltas"],
                seen["weights"],
                seen["thresholds"],
                scored=scored_steps,
                layers=layers,
            )
        )
    for name, whole in found[0].items():
        assert torch.allclose(whole, found[1][name], rtol=1e-9) and bool(whole.any()), name
    assert again == [*reversed(model.model.layers)] * (scored_steps * len(run.batches))
    if scored_steps == 4:
        for name, s in seen["decode"].items():
            assert torch.allclose(s, found[1][name], rtol=1e-9), name


def test_an_offloaded_model_is_scored_layer_by_layer(monkeypatch):
    calls = []
    original = sensitivity.decode_scores
    monkeypatch.setattr(sensitivity, "decode_scores", lambda *a, **k: calls.append(k["layers"]) or original(*a, **k))
    for away in (False, True):
        monkeypatch.setattr("vllm_tilequant.calibrate.pipeline.offloaded", lambda m, away=away: away)
        model, linears = llama()
        Calibration(model, linears, records(), Settings(scores="decode", codes="rtn")).run()
    assert [list(c) for c in calls] == [[], list(model.model.layers)]
