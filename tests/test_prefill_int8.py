"""The prefill's kernels against their references: integers and requantised codes exactly, outputs within their rounding."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from prefill_checks import CONFIG, check, draw_smoothing, served

from cases import MAPS, SHAPES, default_dtype, make_case, make_rows
from tolerances import OUTPUT_RMS, poison_allocator, relative_rms
from vllm_tilequant.kernels import prefill_cuda, prefill_int8, reference
from vllm_tilequant.kernels.layout import align_codes, rotate_inputs, rotation_table
from vllm_tilequant.kernels.tuning import PrefillConfig, default_prefill_config, dump, tuned_prefill
from vllm_tilequant.schema import PREFILL_ACTIVATIONS as ACTIVATIONS
from vllm_tilequant.schema import Transform

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason="Triton with TRITON_INTERPRET=1"
)


@interpreted
@pytest.mark.parametrize(
    ("shape", "kind", "m", "dtype", "smooth"),
    [
        ((64, 64), "all8", 9, torch.float32, False),
        ((128, 192), "mixed2468", 17, torch.bfloat16, True),
        ((576, 64), "mixed48", 41, torch.float16, True),
        ((64, 320), "all4", 43, torch.float32, True),
        ((192, 128), "mixed2468", 50, torch.bfloat16, False),
    ],
)
def test_the_interpreter_runs_the_same_kernels(shape, kind, m, dtype, smooth):
    for activation in ACTIVATIONS:
        check(make_case(*shape, kind), m, dtype, "cpu", path="triton", activation=activation, smooth=smooth)


def scales_at_load_are_those_of_plain_torch(device, shape, kind, smooth):
    """What Triton finds in one read of the decode form, and torch in the checkpoint's."""
    from vllm_tilequant.kernels import prefill_triton

    packed, w, p = served(make_case(*shape, kind), "cpu", smooth)
    poison_allocator(device)
    tables = [None if t is None else t.to(device) for t in (p.rotation, p.index, p.smoothing)]
    got = prefill_triton.largest(w.to(device), *tables)
    for t, wanted in zip(got, prefill_int8._largest(packed, p.rotation, p.index, p.smoothing), strict=True):
        assert torch.equal(t.cpu(), wanted)


SCALED = [((64, 64), "all8", True), ((576, 1088), "mixed2468", True), ((192, 1024), "mixed48", False)]


@interpreted
@pytest.mark.parametrize(("shape", "kind", "smooth"), SCALED)
def test_scales_at_load_are_those_of_plain_torch(shape, kind, smooth):
    scales_at_load_are_those_of_plain_torch("cpu", shape, kind, smooth)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "kind", "smooth"), [*SCALED, ((4096, 4096), "mixed48", True)])
def test_a_gpu_finds_the_same_scales_at_load(shape, kind, smooth):
    scales_at_load_are_those_of_plain_torch("cuda", shape, kind, smooth)


def kept_codes_serve_any_rows(case, device, path):
    """What a long product gives, bit for bit, with as few rows as would otherwise be short."""
    n, k = case.codes.shape
    packed, w, p = served(case, device, True)
    if path == "cuda":
        codes = prefill_int8.expanded(w, p)
    else:
        codes = reference.requantize_ref(packed, case.matrices.to(device), p.smoothing)[0]
    b = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device)
    for m in (1, 9, 41):
        x = make_rows(m, k, torch.bfloat16).to(device)
        y = prefill_int8.prefill_linear(x, w, p, b, path=path, config=CONFIG, codes=codes)
        prefill_int8.workspace(x.device, n, k).fill_(99)  # what is kept does not lie there
        long = prefill_int8.prefill_linear(x, w, p, b, path=path, config=PrefillConfig(1, 0))
        assert torch.equal(y, prefill_int8.prefill_linear(x, w, p, b, path=path, config=CONFIG, codes=codes))
        assert torch.equal(y, long)
    with pytest.raises(ValueError, match="wanted 'token_smooth' with codes that are kept"):
        prefill_int8.prefill_linear(x, w, p, b, path=path, activation="group64", codes=codes)


@interpreted
def test_the_interpreter_takes_kept_codes():
    kept_codes_serve_any_rows(make_case(192, 128, "mixed2468"), "cpu", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
def test_kept_codes(path):
    kept_codes_serve_any_rows(make_case(576, 192, "mixed2468"), "cuda", path)


@interpreted
def test_rows_are_quantised_as_the_references_say():
    from vllm_tilequant.kernels import prefill_triton

    x = make_rows(5, 192, torch.bfloat16)
    smoothing = draw_smoothing(192)
    q, scale = prefill_triton.quantize_rows(x, torch.ones(192) / smoothing)
    wanted, unit = reference.activation_token_ref(x, smoothing)
    assert torch.equal(q, wanted) and torch.equal(scale[:, 0], unit)
    q, scale = prefill_triton.quantize_groups(x)
    wanted, unit = reference.activation_int8_ref(x)
    order = [8 * d + 2 * c + i for c in range(4) for d in range(8) for i in range(2)]
    assert torch.equal(q[:, :5], wanted.view(5, -1, 64).transpose(0, 1)[..., order])
    assert torch.equal(scale[:, :5].T, unit)


ROTATION = rotation_table(Transform(kind="randomized_hadamard", seed=7))


def rows_rotate_and_quantise(m, k, dtype, device):
    """One launch against rotation followed by quantisation: the same bits."""
    from vllm_tilequant.kernels import prefill_triton

    x = make_rows(m, k, dtype)
    rotated = rotate_inputs(x, ROTATION)
    poison_allocator(device)
    q, scale = (t.cpu() for t in prefill_triton.quantize_rows(x.to(device), None, ROTATION.to(device)))
    wanted, unit = reference.activation_token_ref(rotated)
    assert torch.equal(q, wanted) and torch.equal(scale[:, 0], unit)
    q, scale = (t.cpu() for t in prefill_triton.quantize_groups(x.to(device), ROTATION.to(device)))
    wanted, unit = prefill_triton.quantize_groups(rotated.to(device))
    assert torch.equal(q[:, :m], wanted[:, :m].cpu()) and torch.equal(scale[:, :m], unit[:, :m].cpu())
    wanted, unit = reference.activation_int8_ref(rotated)
    assert torch.equal(scale[:, :m].T, unit) and torch.equal(q[:, :m].sum((0, 2)), wanted.sum(1, dtype=q.sum().dtype))


@interpreted
@pytest.mark.parametrize(
    ("m", "k", "dtype"),
    [(1, 64, torch.float32), (5, 576, torch.bfloat16), (3, 4160, torch.float16), (1029, 64, torch.bfloat16)],
)
def test_rotated_rows_take_no_launch_more(m, k, dtype):
    rows_rotate_and_quantise(m, k, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 64), (17, 576), (9, 4160), (1031, 1536)])
def test_a_gpu_rotates_and_quantises_in_one_launch(m, k, dtype):
    rows_rotate_and_quantise(m, k, dtype, "cuda")


@interpreted
def test_rotated_prompts_equal_their_reference():
    rotated_prompts("cpu", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("path", prefill_int8.PATHS)
def test_a_gpu_rotates_prompts(path):
    rotated_prompts("cuda", path)


def rotated_prompts(device, path):
    case = make_case(128, 192)
    packed, w, p = served(case, device, False)
    matrices = case.matrices.to(device)
    for m in (20, 50):
        x = make_rows(m, 192, torch.bfloat16).to(device)
        y = prefill_int8.prefill_linear(x, w, p, rotation=ROTATION.to(device), path=path, config=CONFIG)
        rotated = rotate_inputs(x, ROTATION.to(device))
        if prefill_int8.way(x, CONFIG, "token_smooth", path, rotated=True) == "short":
            wanted = reference.linear_ref(rotated, packed, matrices, int8=True)
        else:
            wanted = reference.prefill_int8_ref(rotated, packed, matrices)
        assert y.dtype == torch.bfloat16 and relative_rms(y, wanted) <= OUTPUT_RMS["bfloat16"], m


@interpreted
def test_inputs_are_rotated_or_smoothed():
    _, w, p = served(make_case(64, 64), "cpu", True)
    with pytest.raises(ValueError, match="one or the other"):
        prefill_int8.prefill_linear(make_rows(3, 64), w, p, rotation=ROTATION, path="triton", config=CONFIG)


@interpreted
def test_many_rows_are_quantised_alike():
    from vllm_tilequant.kernels import prefill_triton

    smoothing = draw_smoothing(1088)
    for whole_row in (64, 1088):  # read twice and once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill_triton, "WHOLE_ROW", whole_row)
            for by in (None, smoothing):
                x = make_rows(11, 1088, torch.bfloat16)
                q, scale = prefill_triton.quantize_rows(x, None if by is None else 1 / by)
                wanted, unit = reference.activation_token_ref(x, by)
                assert torch.equal(q, wanted) and torch.equal(scale[:, 0], unit)


@interpreted
def test_warming_calls_every_form():
    from vllm_tilequant.kernels import prefill_triton

    _, w, p = served(make_case(64, 64), "cpu", False)
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("short", "expand", "gemm"):
            patch.setattr(prefill_triton, name, lambda *args, name=name: called.append(name))
        prefill_int8.warm(w, p, torch.bfloat16)
    assert called == ["short", "short", "expand", "gemm", "expand", "gemm"]


@interpreted
def test_a_nan_stays_in_its_row_on_the_interpreter():
    nan_stays_in_its_row("cpu", "triton")


def nan_stays_in_its_row(device, path):
    case = make_case(192, 320)
    _, w, p = served(case, device, True)
    for m, activation in ((20, "group64"), (60, "token_smooth")):
        x = make_rows(m, 320, torch.bfloat16).to(device)
        kwargs = {"activation": activation, "path": path, "config": CONFIG}
        clean = prefill_int8.prefill_linear(x, w, p, **kwargs)
        x[3, 7] = float("nan")
        y = prefill_int8.prefill_linear(x, w, p, **kwargs)
        assert bool(y[3].isnan().all())
        assert torch.equal(torch.cat((y[:3], y[4:])), torch.cat((clean[:3], clean[4:])))


@interpreted
def test_the_check_at_load_sees_a_wrong_kernel(monkeypatch):
    from vllm_tilequant.kernels import prefill_triton

    device = torch.device("cpu")
    assert prefill_int8.self_check(device, "triton") is None
    for name, fault in (("short", "short kernel"), ("expand", "expansion")):
        with monkeypatch.context() as patch:
            right = getattr(prefill_triton, name)

            def wrong(*args, right=right):
                right(*args)
                args[-1][-1, -1] += 1

            patch.setattr(prefill_triton, name, wrong)
            assert fault in prefill_int8.self_check(device, "triton")


def test_a_server_s_default_dtype_changes_nothing():
    case = make_case(192, 128)
    want = served(case, "cpu", True)
    with default_dtype(torch.bfloat16):
        got = served(case, "cpu", True)
    assert got[1].factor.dtype == torch.float32 and torch.equal(got[1].factor, want[1].factor)
    for a, b in zip(got[2].tensors(), want[2].tensors(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@interpreted
def test_the_check_at_load_runs_while_a_server_loads():
    with default_dtype(torch.bfloat16):
        assert prefill_int8.self_check(torch.device("cpu"), "triton") is None


@pytest.mark.gpu
def test_the_check_at_load_passes():
    assert prefill_int8.self_check(torch.device("cuda"), "cuda") is None


@pytest.mark.parametrize("kind", MAPS)
def test_scales_of_the_requantised_weight_equal_the_reference(kind):
    for shape in SHAPES:
        case = make_case(*shape, kind)
        for smooth in (False, True):
            packed, _, p = served(case, "cpu", smooth)
            codes, scale = reference.requantize_ref(packed, case.matrices, p.smoothing)
            assert torch.equal(p.scale[:, 0], scale)
            assert int(codes.abs().max()) == 127
            weight = codes.double() * scale.double()[:, None]
            exact = case.matrices @ ((align_codes(case.codes, packed.tile_bits).double() - 128).view(-1, 64, shape[1]))
            unit = packed.tile_scale * torch.exp2(packed.tile_bits.float() - 8)
            exact = exact.view(shape) * unit.repeat_interleave(64, 0).repeat_interleave(64, 1)
            exact = exact if p.smoothing is None else exact * p.smoothing
            assert bool(((weight - exact).abs() <= scale.double()[:, None] * 0.5001).all())


def test_a_prefill_weight_survives_as_a_list_of_tensors():
    for smooth in (False, True):
        _, _, p = served(make_case(64, 128), "cpu", smooth)
        assert len(p.tensors()) == (10 if smooth else 8)
        again = prefill_int8.PrefillWeight(*p.tensors())
        assert all(a is b for a, b in zip(p.tensors(), again.tensors(), strict=True))


def test_wrong_arguments_are_named():
    case = make_case(64, 128)
    _, w, p = served(case, "cpu", False)
    x = torch.zeros(9, 128)
    for bad, message in (
        (x.int(), "x is torch.int32"),
        (x[:, :64], r"wanted \[1.., 128\]"),
        (x.T.contiguous().T, "contiguous rows"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            prefill_int8.prefill_linear(bad, w, p)
    with pytest.raises(ValueError, match="bias is"):
        prefill_int8.prefill_linear(x, w, p, torch.zeros(63))
    with pytest.raises(ValueError, match="path is 'best'"):
        prefill_int8.prefill_linear(x, w, p, path="best")
    with pytest.raises(NotImplementedError, match=r"wanted 9\.0"):
        prefill_int8.prefill_linear(x, w, p, path="cuda")
    for smoothing in (torch.ones(64), torch.ones(128).double(), torch.zeros(128)):
        with pytest.raises(ValueError, match="smoothing"):
            prefill_int8.prepare(case.weight, w, smoothing=smoothing)


def test_the_workspace_is_one_and_only_grows():
    device = torch.device("cpu")
    prefill_int8.reserve(device, 128, 64)
    first = prefill_int8.workspace(device, 64, 64)
    assert first.shape == (64, 64) and prefill_int8.workspace(device, 128, 64).data_ptr() == first.data_ptr()
    size = prefill_int8._workspaces[device].numel()
    prefill_int8.reserve(device, 64, 64)
    assert prefill_int8._workspaces[device].numel() == size


def test_tuned_configurations_are_legal_and_written_back():
    text = dump("h200", {}, {}, {(64, 128): PrefillConfig(4, 300)})
    assert '"n": 64' in text and '"splits": 4' in text
    for (n, k), config in tuned_prefill("h200").items():
        assert n % 64 == 0 and k % 64 == 0 and config.short_rows >= 8
    assert default_prefill_config(4096, 4096, 132).splits == 8
    assert default_prefill_config(28672, 4096, 132).splits == 2
    assert default_prefill_config(64, 64, 132).splits == 1
    with pytest.raises(ValueError, match="splits"):
        PrefillConfig(splits=17)


@pytest.mark.gpu
@pytest.mark.parametrize("path", prefill_int8.PATHS)
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_maps_and_rows(shape, kind, path):
    case = make_case(*shape, kind)
    for m in (1, 9, 17, 33, 40, 41, 130):
        check(case, m, torch.bfloat16, "cuda", path=path, smooth=bool(m % 2))
        if m > CONFIG.short_rows:
            check(case, m, torch.bfloat16, "cuda", path=path, activation="group64")


@pytest.mark.gpu
@pytest.mark.parametrize("path", prefill_int8.PATHS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_dtypes_and_bias(dtype, path):
    case = make_case(576, 1536)
    for m in (12, 70, 300):
        for bias in (True, False):
            for activation in ACTIVATIONS:
                check(case, m, dtype, "cuda", path=path, activation=activation, bias=bias, smooth=True)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8, 16])
def test_every_cut_of_the_short_kernel(splits):
    for shape in ((1088, 1536), (192, 320)):
        for m in (10, 20, 40, 100):
            config = PrefillConfig(splits, 128)
            check(make_case(*shape, "mixed2468"), m, torch.bfloat16, "cuda", path="cuda", config=config)


@pytest.mark.gpu
def test_the_short_kernel_walks_over_many_input_tiles():
    """More than the steps that a CTA keeps ready, and odd numbers of them."""
    for k, kind in ((8256, "mixed2468"), (4352, "all8"), (6208, "mixed48")):
        for m in (10, 40, 100):
            for splits in (1, 2):
                check(make_case(320, k, kind), m, torch.bfloat16, "cuda", path="cuda", config=PrefillConfig(splits, 128))


@pytest.mark.gpu
def test_many_rows_take_several_launches_of_the_short_kernel(monkeypatch):
    monkeypatch.setattr(prefill_cuda, "PARTS_BYTES", 1)
    for m in (128, 300, 385):
        config = PrefillConfig(3, 0)
        check(make_case(576, 1536, "mixed2468"), m, torch.bfloat16, "cuda", path="cuda", activation="group64", config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 5, 40])
def test_every_cut_of_the_expansion(multiprocessors, monkeypatch):
    """CTAs that go on from one block of outputs to the next."""
    monkeypatch.setattr(prefill_cuda, "multiprocessors", lambda device: SimpleNamespace(count=multiprocessors))
    monkeypatch.setattr(prefill_cuda, "MOST_STEPS", 10)
    for shape in ((1088, 1536), (1600, 64)):
        for smooth in (False, True):
            check(make_case(*shape, "mixed2468"), 41, torch.bfloat16, "cuda", path="cuda", smooth=smooth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "k"),
    [(1, 64), (700, 4096), (1030, 2048), (37, 4160), (301, 8256), (5, 12288), (600, 14336), (265, 16384)]
    + [(14801, 64), (7401, 4096), (3701, 4160), (1851, 14336)],  # so many that CTAs ask for them
)
def test_rows_in_the_launch_of_the_expansion(m, k, dtype):
    case = make_case(64, k)
    for smooth in (False, True):
        packed, w, p = served(case, "cuda", smooth)
        x = make_rows(m, k, dtype).cuda()
        x[m // 3, k // 2] = float("nan")
        out = torch.full((64, k), -128, dtype=torch.int8, device="cuda")
        poison_allocator("cuda")
        q, scale = prefill_cuda.quantize_and_expand(
            x, p.unsmoothing, w, p.rotation, p.index, p.inverse, p.smoothing, out
        )  # fmt: skip
        assert not int(prefill_cuda.rows_asked(w.device))
        wanted, unit = reference.activation_token_ref(x, p.smoothing)
        whole = ~unit.isnan()
        assert not whole[m // 3] and bool(scale[~whole].isnan().all())
        assert torch.equal(q[whole], wanted[whole]) and torch.equal(scale[whole, 0], unit[whole])
        assert torch.equal(out, reference.requantize_ref(packed, case.matrices.cuda(), p.smoothing)[0])


@pytest.mark.parametrize("k", [64, 2048, 4096, 4160, 14336, 16384])
def test_every_row_is_somebody_s(k):
    forms = set()
    for m in (1, 2, 263, 264, 265, 512, 1055, 2112, 8192, 40000):
        for n_tiles in (1, 64, 448):
            steps = -(-n_tiles // 8) * (k // 64)
            ctas = min(steps, 264)
            most = -(-steps // ctas)
            form, grid, first, per_cta = prefill_cuda._rows_cut(m, k, n_tiles, most, ctas, 264)
            assert grid >= ctas and 0 <= first < grid
            if form == prefill_cuda.MANY:  # three looks of every CTA are its own
                assert m // (16384 // max(2048, 1 << (k - 1).bit_length())) >= 3 * grid
            else:
                assert per_cta * (grid - first) >= m > (per_cta - 1) * (grid - first)
                assert form == (prefill_cuda.FEW if k <= 4096 and most <= 4 else prefill_cuda.SOME)
            forms.add(form)
    assert len(forms) >= 2


@pytest.mark.gpu
def test_rows_that_no_launch_can_share_are_quantised_before():
    """Long ones, rows that are not aligned, and float32."""
    rows = (make_rows(50, 16448, torch.bfloat16), make_rows(50, 196, torch.bfloat16), make_rows(50, 192))
    long, wide, exact = (x.cuda() for x in rows)
    for x in (long, wide[:, 3:195], exact):  # cut where they stay: a copy would be aligned
        case = make_case(64, x.shape[1])
        packed, w, p = served(case, "cuda", True)
        assert not prefill_cuda.takes_rows(x)
        y = prefill_int8.prefill_linear(x, w, p, path="cuda", config=CONFIG)
        wanted = reference.prefill_int8_ref(x, packed, case.matrices.cuda(), smoothing=p.smoothing)
        assert relative_rms(y, wanted) <= OUTPUT_RMS[str(x.dtype).removeprefix("torch.")]


@pytest.mark.gpu
def test_the_server_s_matrix_product_gives_the_same():
    ops = pytest.importorskip("vllm._custom_ops")

    def gemm(q, codes, scale, unit, bias, dtype):
        return ops.cutlass_scaled_mm(q, codes.t(), scale, unit, dtype, bias)

    for m in (64, 300):
        check(make_case(576, 1536), m, torch.bfloat16, "cuda", path="cuda", smooth=True, gemm=gemm)


@pytest.mark.gpu
@pytest.mark.parametrize("path", prefill_int8.PATHS)
def test_a_nan_stays_in_its_row(path):
    nan_stays_in_its_row("cuda", path)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [20, 60])
def test_replays_of_one_graph_follow_their_inputs(m):
    _, w, p = served(make_case(576, 1536), "cuda", True)
    x = make_rows(m, 1536, torch.bfloat16).cuda()
    prefill_int8.reserve(x.device, 576, 1536)
    prefill_int8.prefill_linear(x, w, p, config=CONFIG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = prefill_int8.prefill_linear(x, w, p, config=CONFIG)
    for seed in (1, 2):
        x.copy_(make_rows(m, 1536, torch.bfloat16, seed))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, prefill_int8.prefill_linear(x, w, p, config=CONFIG))
