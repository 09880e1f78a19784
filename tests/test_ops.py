"""The plugin's op on both devices: dispatch by rows, tracing, and on a GPU the kernel under CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import ROWS, THRESHOLDS, TRANSFORMS, default_dtype, make_case, make_rows
from tolerances import OUTPUT_RMS, poison_allocator, relative_rms
from vllm_tilequant import ops
from vllm_tilequant.kernels import decode_weight, layout, prefill_int8, reference
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.dispatch import LinearWeight, check_ahead, portable_reason, prepare
from vllm_tilequant.ops import tile_linear
from vllm_tilequant.schema import Transform

ROTATION = layout.rotation_table(Transform(kind="randomized_hadamard", seed=7))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def served(n, k, device, dtype, activation="group64", rotation=None):
    case = make_case(n, k)
    weight = replace(case.weight, input_rotation=rotation)
    return case, prepare(layout.to_device(weight, device), TRANSFORMS, dtype, activation)


def arguments(w: LinearWeight):
    """The op's arguments that stand for a weight."""
    static = [w.static] if isinstance(w.static, torch.Tensor) else w.static.tensors()
    graded = [t for t in vars(w.graded).values() if isinstance(t, torch.Tensor)]
    return static, graded, isinstance(w.graded, DecodeWeight), w.out_features, w.input_rotation


def call(x, w: LinearWeight, bias, thresholds, limit=8, activation="group64", prefill="token_smooth"):
    return tile_linear(x, *arguments(w), bias, thresholds, limit, activation, prefill)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_every_number_of_rows_equals_the_reference(device, dtype):
    case, w = served(576, 1536, device, dtype)
    thresholds, bias = torch.tensor(THRESHOLDS["graded"], device=device), torch.randn(576).to(device, dtype)
    for m in (*ROWS, 4, 5, 6):
        x = make_rows(m, 1536, dtype)
        got = call(x.to(device), w, bias, thresholds).cpu()
        if m <= 8:
            want = reference.decode_bitplane_ref(x, case.weight, case.matrices, thresholds.cpu(), bias.cpu())
        elif device == "cuda" and m > 16 and dtype != torch.float32:  # the default of a shape that is not tuned
            want = reference.prefill_block_ref(x, case.weight, case.matrices, bias.cpu())
        else:
            want = reference.linear_ref(x, case.weight, case.matrices, bias.cpu(), int8=True)
        # Above the limit x and W are rounded to the dtype before the product: three roundings instead of one.
        bound = OUTPUT_RMS[str(dtype).removeprefix("torch.")] * (1 if m <= 8 else 2)
        assert relative_rms(got, want) <= bound, m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_rotated_inputs_are_graded_and_quantized_after_the_rotation(device, dtype):
    case, w = served(192, 320, device, dtype, rotation=ROTATION)
    thresholds = torch.tensor(THRESHOLDS["graded"], device=device)
    for m in (1, 8, 17):
        x = make_rows(m, 320, dtype)
        got = call(x.to(device), w, None, thresholds).cpu()
        assert got.dtype == dtype
        rotated = layout.rotate_inputs(x, ROTATION)
        if m <= 8:
            want = reference.decode_bitplane_ref(rotated, case.weight, case.matrices, thresholds.cpu())
        else:
            # plain torch rounds to the dtype between rotation and INT8, the kernels do both at once
            seen = rotated if device == "cuda" else rotated.to(dtype)
            want = reference.linear_ref(seen, case.weight, case.matrices, int8=True)
        assert relative_rms(got, want) <= OUTPUT_RMS[str(dtype).removeprefix("torch.")] * (1 if m <= 8 else 2), m
    if device == "cuda":
        assert torch.equal(layout.rotate_inputs(x.to(device), ROTATION.to(device)).cpu(), rotated)


@pytest.mark.parametrize("rotation", [None, ROTATION])
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_is_the_same_alone_and_in_any_batch(device, rotation):
    _, w = served(576, 1536, device, torch.bfloat16, rotation=rotation)
    thresholds = torch.tensor(THRESHOLDS["graded"], device=device)
    rows = torch.cat([make_rows(4, 1536, torch.bfloat16, seed=s) for s in (1, 2)]).to(device)
    alone = torch.cat([call(rows[i : i + 1], w, None, thresholds) for i in range(8)])
    for m in range(2, 9):
        assert torch.equal(call(rows[:m], w, None, thresholds), alone[:m])
        assert torch.equal(call(rows[8 - m :], w, None, thresholds), alone[8 - m :])


@pytest.mark.gpu
def test_a_gpu_keeps_the_packed_tiles_alone():
    _, w = served(1024, 1536, "cuda", torch.bfloat16)  # whole blocks of 512 outputs: what fills one up is stored as well
    static, graded, *_ = arguments(w)
    assert sum(t.nbytes for t in static + graded) < 1024 * 1536  # a byte a weight, and bf16 would be two
    assert max(t.nbytes for t in static) < 64 * 1024


@pytest.mark.gpu
def test_the_kernels_ask_only_where_codes_start():
    """A traced model hands over their first unit: its shape says nothing of the map."""
    _, w = served(576, 1536, "cuda", torch.bfloat16)
    thresholds, rows = torch.tensor(THRESHOLDS["graded"], device="cuda"), make_rows(600, 1536, torch.bfloat16).cuda()
    static, graded, *rest = arguments(w)
    for m in (1, 4, 17, 600):
        got = tile_linear(rows[:m], static, [graded[0][:1], *graded[1:]], *rest, None, thresholds, 8, "group64", "token_smooth")
        assert torch.equal(got, call(rows[:m], w, None, thresholds)), m


@pytest.mark.gpu
def test_prompts_equal_their_reference():
    """Beyond the short kernel's rows, in both arithmetics."""
    case, w = served(576, 1536, "cuda", torch.bfloat16)
    thresholds, x = torch.tensor(THRESHOLDS["graded"], device="cuda"), make_rows(600, 1536, torch.bfloat16)
    for prefill, want in (
        ("token_smooth", reference.prefill_int8_ref(x, case.weight, case.matrices)),
        ("group64", reference.linear_ref(x, case.weight, case.matrices, int8=True)),
    ):
        got = call(x.cuda(), w, None, thresholds, prefill=prefill).cpu()
        assert relative_rms(got, want) <= OUTPUT_RMS["bfloat16"], prefill


def test_what_is_made_once_is_known_by_every_tensor(monkeypatch):
    monkeypatch.setattr(ops, "_calls", {})
    monkeypatch.setattr(ops, "int8_gemm", lambda device: print)
    monkeypatch.setattr(ops, "Call", lambda *args: [args])
    case = make_case(128, 320)
    graded = decode_weight.prepare(case.weight, TRANSFORMS)
    static = prefill_int8.prepare(case.weight, graded).tensors()
    graded = [t for t in vars(graded).values() if isinstance(t, torch.Tensor)]

    def made(static=static, graded=graded, dtype=torch.bfloat16, activation="token_smooth", n=128):
        return ops._call(make_rows(20, 320, dtype), static, graded, n, activation)

    first = made()
    assert made(list(static), list(graded)) is first
    others = [made([*static[:i], t.clone(), *static[i + 1 :]]) for i, t in enumerate(static)]
    others += [made(graded=[*graded[:i], t.clone(), *graded[i + 1 :]]) for i, t in enumerate(graded)]
    others += [made(dtype=torch.float16), made(activation="group64"), made(n=64)]
    assert len({id(call) for call in (first, *others)}) == 1 + len(others) == 1 + len(static) + len(graded) + 3
    monkeypatch.setattr(ops, "_MOST_CALLS", len(ops._calls))
    made(n=192)
    assert len(ops._calls) == 1 and made() is not first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smooth", [False, True])
def test_what_is_made_once_computes_the_same(dtype, smooth):
    def gemm(q, codes, scale, unit, bias, dtype):
        y = torch._int_mm(q, codes.t()) * scale * unit.T
        return (y if bias is None else y + bias).to(dtype)

    n, k = 576, 1536
    packed = layout.to_device(make_case(n, k).weight, "cuda")
    graded = decode_weight.prepare(packed, TRANSFORMS)
    smoothing = torch.exp(torch.randn(k, device="cuda", dtype=torch.float32) * 0.7) if smooth else None
    static = prefill_int8.prepare(packed, graded, smoothing=smoothing)
    bias = torch.randn(n, device="cuda").to(dtype)
    made = prefill_int8.Call(graded, static, dtype, "token_smooth", gemm)
    for m, b in ((600, None), (128, bias), (257, bias), (66, None), (600, bias), (100, None), (1200, None)):
        x = make_rows(m, k, dtype, seed=m).cuda()
        poison_allocator("cuda")
        prefill_int8.workspace(x.device, n, k).fill_(99)
        y = made(x, static.scale, b)
        assert torch.equal(y, prefill_int8.prefill_linear(x, graded, static, b, gemm=gemm))
        prefill_int8.reserve(x.device, n + m, k)  # another workspace
    assert made(x, static.scale, bias.float()) is None
    assert made(x[:9], static.scale, None) is None
    assert made(x.view(-1)[1 : 1 + 600 * k].view(600, k), static.scale, None) is None
    assert prefill_int8.Call(graded, static, dtype, "token_smooth", None)(x, static.scale, None) is None
    with pytest.raises(NotImplementedError):
        prefill_int8.Call(graded, static, torch.float32, "token_smooth", gemm)


@pytest.mark.gpu
def test_a_gpu_takes_the_kernel_unless_activations_stay_float():
    device = torch.device("cuda")
    assert isinstance(served(64, 128, device, torch.bfloat16)[1].graded, DecodeWeight)
    assert not isinstance(served(64, 128, device, torch.bfloat16, "none")[1].graded, DecodeWeight)


def test_the_choice_of_the_portable_path_says_why():
    cpu = torch.device("cpu")
    assert "no CUDA GPU" in portable_reason(64, 64, torch.bfloat16, cpu, "group64")
    assert "INT8" in portable_reason(64, 64, torch.bfloat16, cpu, "none")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_one_captured_graph_serves_every_profile(m):
    """Thresholds are read when a graph is replayed, outputs are poisoned before."""
    case, w = served(576, 1536, "cuda", torch.bfloat16)
    x = make_rows(m, 1536, torch.bfloat16)
    on_gpu, thresholds = x.cuda(), torch.tensor(THRESHOLDS["graded"], device="cuda")
    call(on_gpu, w, None, thresholds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(on_gpu, w, None, thresholds)
    for values in (THRESHOLDS["graded"], THRESHOLDS["full"], THRESHOLDS["skip2and6"]):
        thresholds.copy_(torch.tensor(values))
        y.fill_(float("nan"))
        graph.replay()
        want = reference.decode_bitplane_ref(x, case.weight, case.matrices, torch.tensor(values))
        assert relative_rms(y.cpu(), want) <= OUTPUT_RMS["bfloat16"]
        assert torch.equal(y, call(on_gpu, w, None, thresholds))


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_still_chooses_by_rows(device):
    _, w = served(192, 320, device, torch.float32)
    thresholds = torch.tensor(THRESHOLDS["graded"], device=device)
    weight = arguments(w)

    def model(x):
        return tile_linear(x, *weight, None, thresholds, 8, "group64", "token_smooth")

    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for m in (20, 9, 8, 3):
        x = make_rows(m, 320).to(device)
        assert torch.equal(graph(x), call(x, w, None, thresholds))


def test_a_check_ahead_is_only_of_gpus():
    assert check_ahead(torch.device("cpu")) is None


@pytest.mark.gpu
def test_what_a_check_ahead_meets_is_raised_where_it_is_waited_for(monkeypatch):
    """Whatever the default dtype is meanwhile, and once for all layers."""
    device = torch.device("cuda", torch.cuda.current_device())
    check_ahead.cache_clear()
    with default_dtype(torch.bfloat16):
        check_ahead(device).result()
        assert check_ahead(device) is check_ahead(device)

    def broken(device):
        raise RuntimeError("no such kernel")

    check_ahead.cache_clear()
    monkeypatch.setattr(prefill_int8, "device_path", broken)
    check_ahead(device)
    with pytest.raises(RuntimeError, match="no such kernel"):
        served(128, 128, device, torch.bfloat16)
    check_ahead.cache_clear()
