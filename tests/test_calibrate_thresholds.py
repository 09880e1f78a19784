"""The other ways to thresholds: a price per group, GRINQH's Table 3 and its random search."""

import math

import pytest
import torch
from torch import nn

from cases import make_map
from tiny import llama, records
from vllm_tilequant.calibrate import search
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.table3 import distribution
from vllm_tilequant.calibrate.thresholds import GroupStatistics, Histogram, optimal_thresholds_per_group
from vllm_tilequant.kernels import layout, portable, reference
from vllm_tilequant.schema import LEVELS, NEVER

pytestmark = pytest.mark.calibrate


def statistics(kind, seed, k=256, n=256):
    g = torch.Generator().manual_seed(seed)
    tile_bits = make_map(kind, n // 64, k // 64, g)
    x = torch.randn(256, k, generator=g) * torch.randn(k, generator=g).exp()
    histogram = Histogram(k)
    histogram.add_record(x)
    errors = torch.tensor([1.0, 0.2, 0.02, 0.001, 0.0], dtype=torch.float64) * (seed + 1)
    return GroupStatistics(histogram, errors, layout.level_cost(tile_bits), n * k), x, tile_bits


@pytest.mark.parametrize("target", [2.0, 3.0])
def test_every_group_meets_the_target_under_a_price_of_its_own(target):
    parts = {f"g{i}": statistics("mixed48", i) for i in range(3)} | {"narrow": statistics("all4", 3)}
    found = optimal_thresholds_per_group({n: p[0] for n, p in parts.items()}, target)
    for name, (_, x, tile_bits) in parts.items():
        read = layout.loaded_code_bits(reference.levels_ref(x, found[name]), tile_bits).mean() / (tile_bits.numel() * 4096)
        assert abs(float(read) - target) < 0.03, name


def test_a_group_that_stores_less_than_the_target_reads_what_it_has():
    parts = {"narrow": statistics("all4", 0), "wide": statistics("all8", 1), "wider": statistics("all8", 2)}
    found = optimal_thresholds_per_group({n: p[0] for n, p in parts.items()}, 5.0)
    _, x, tile_bits = parts["narrow"]
    read = layout.loaded_code_bits(reference.levels_ref(x, found["narrow"]), tile_bits).mean() / (tile_bits.numel() * 4096)
    assert float(read) > 3.9
    with pytest.raises(ValueError, match="cannot be reached"):
        optimal_thresholds_per_group({n: p[0] for n, p in parts.items()}, 7.9)


def test_the_rows_of_table_3_are_distributions_and_names_are_checked():
    for widest, n in ((8, 60), (6, 60), (4, 52)):
        for row in range(1, n + 1):
            p = distribution(f"{widest}-{row}")
            assert len(p) == 5 and math.isclose(sum(p), 1, abs_tol=1e-9), (widest, row)
            assert all(share == 0 for level, share in zip(LEVELS, p, strict=True) if level > widest)
    assert distribution("8-42") == [0.30, 0.09, 0.14, 0.07, 0.40]
    assert distribution("6-60") == [0.15, 0.25, 0.40, 0.20, 0.0]
    assert distribution("4-2") == [0.20, 0.05, 0.75, 0.0, 0.0]
    for wrong in ("8-0", "8-61", "5-1", "8", "8-x", "4-53", ""):
        with pytest.raises(ValueError, match="8-1 to 8-60"):
            distribution(wrong)


def test_table_3_gives_the_same_thresholds_as_its_shares():
    model, linears = llama(torch.float32)
    found = []
    for kind, target in (("table3", "8-17"), ("percentile", [0.30, 0.15, 0.16, 0.39, 0.0])):
        settings = Settings(thresholds=kind, profiles={"p": target}, default_profile="p", codes="rtn")
        found.append(Calibration(model, linears, records(2), settings).run().thresholds)
    for name, t in found[0].items():
        assert torch.equal(t, found[1][name]) and t[0, 3] == pytest.approx(NEVER)


# ---- search

COST = torch.tensor([0.0, 2.0, 4.0, 4.8, 5.6], dtype=torch.float64)  # 60 % of the tiles at 4 bits


@pytest.mark.parametrize("target", [2.0, 3.0, 4.0, 5.3])
def test_sampled_distributions_keep_the_constraints(target):
    g = torch.Generator().manual_seed(0)
    found = search.sample_distributions(COST, target, 15, g)
    assert len(found) == 15 and len({tuple(p) for p in found}) == 15
    for p in found:
        assert math.isclose(sum(p), 1, rel_tol=1e-9) and min(p) >= 0
        assert abs(float(torch.tensor(p, dtype=torch.float64) @ COST) - target) <= 0.05
        assert target > 4.2 or 0.15 <= p[0] <= 0.30
    again = search.sample_distributions(COST, target, 15, torch.Generator().manual_seed(0))
    assert again == found


def test_levels_that_read_nothing_more_get_no_share_and_targets_out_of_reach_are_refused():
    cost = torch.tensor([0.0, 2.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    for p in search.sample_distributions(cost, 2.5, 5, torch.Generator()):
        assert p[3] == p[4] == 0
    with pytest.raises(ValueError, match="cannot be reached"):
        search.sample_distributions(cost, 4.5, 5, torch.Generator())


def test_candidates_are_graded_as_one_by_one():
    """Against float64: sum over channels of INT8 x times the code's leading bits plus the midpoint."""
    g = torch.Generator().manual_seed(0)
    bits = make_map("mixed48", 2, 3, g)
    codes = (torch.rand(128, 192, generator=g) * 2.0 ** layout.expand_tiles(bits).float()).to(torch.uint8)
    packed = layout.pack(codes, bits, torch.rand(2, 3, generator=g) + 0.1, torch.tensor([0, 1], dtype=torch.uint8))
    u = torch.linalg.qr(torch.randn(2, 64, 64, generator=g, dtype=torch.float64)).Q
    x, bias = torch.randn(2, 5, 192, generator=g), torch.randn(128, generator=g)
    thresholds = torch.tensor([[0.1, 0.4, 0.9, 1.5], [0.3, 0.3, 1.2, NEVER]])
    got = search.graded_candidates(x, portable.prepare(packed, u), bias, thresholds)
    for c in range(2):
        q, s = reference.activation_int8_ref(x[c])
        x_hat = (q.double().view(5, 3, 64) * s.double()[..., None]).view(5, 192)
        levels = reference.levels_ref(x[c], thresholds[c])
        y = torch.zeros(5, 128, dtype=torch.float64)
        for level in LEVELS[1:]:
            y += x_hat.where(levels == level, 0.0) @ reference.level_weight_ref(packed, level).double().T
        y = torch.stack([y[:, 64 * j : 64 * j + 64] @ u[j].T for j in range(2)], 1).view(5, 128) + bias.double()
        assert torch.allclose(got[c].double(), y, rtol=1e-4, atol=1e-4)


def test_search_keeps_the_candidate_with_the_lowest_perplexity():
    model, linears = llama(torch.float32)
    batches = records(2)
    settings = Settings(
        thresholds="search", search_candidates=4, profiles={"a": 2.5, "b": 3.5}, default_profile="a", codes="rtn"
    )
    run = Calibration(model, linears, batches, settings)
    result = run.run()
    for row, (name, target) in enumerate(settings.profiles.items()):
        report = result.report["search"][name]
        assert len(report["perplexities"]) == 4 and report["perplexity"] == min(report["perplexities"])
        loaded = weights = 0.0
        loss, predicted = 0.0, 0
        # The chosen candidate again, alone: dense products per level, thresholds from the result.
        plain, targets = llama(torch.float32)
        read = {}

        def graded(module, args, y, name, read=read, row=row):
            group = run.basis.group_of[name]
            w = portable.prepare(result.weights[name], run.basis.matrices)
            x = args[0][0]
            read.setdefault(name, []).append((reference.levels_ref(x, result.thresholds[group][row]), w))
            return portable.graded_linear(x, w, None, result.thresholds[group][row], activation="group64")[None]

        for n, m in targets.items():
            m.register_forward_hook(lambda m, args, y, n=n, graded=graded: graded(m, args, y, n))
        with torch.no_grad():
            for batch in batches:
                ids = batch["input_ids"]
                logits = plain(input_ids=ids, use_cache=False).logits
                loss += float(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
                predicted += ids.shape[1] - 1
        # Other orders of float32 additions let single activations fall on the other side of a threshold.
        assert math.isclose(math.exp(loss / predicted), report["perplexity"], rel_tol=2e-3)
        for calls in read.values():
            for levels, w in calls:
                loaded += float(layout.loaded_code_bits(levels, w.tile_bits).sum())
                weights += levels.shape[0] * w.codes.numel()
        assert abs(loaded / weights - target) < 0.15


def test_profiles_beyond_the_budget_are_refused_before_any_work():
    model, linears = llama(torch.float32)
    settings = Settings(stored_bits=4.8, profiles={"3.0": 3.0, "high": 4.9})
    with pytest.raises(ValueError, match=r"\['high'\] want more loaded bits than the codes have \(4\.6"):
        Calibration(model, linears, [], settings).run()
