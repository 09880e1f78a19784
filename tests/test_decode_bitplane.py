"""The graded GEMV against float64 and against exact integers: CUDA C++ and Triton on a GPU, Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from cases import MAPS, ROWS, SHAPES, THRESHOLDS, TRANSFORMS, default_dtype, make_case, make_rows
from tolerances import OUTPUT_RMS, poison_allocator, relative_rms
from vllm_tilequant.kernels import decode_bitplane, dispatch, prefill_int8, reference
from vllm_tilequant.kernels.capability import MAX_ROWS
from vllm_tilequant.kernels.decode_bitplane import decode_linear, decode_sums, prepare
from vllm_tilequant.kernels.layout import to_device
from vllm_tilequant.kernels.tuning import DecodeConfig, StreamConfig

GPU_ROWS = sorted({min(m, MAX_ROWS) for m in ROWS} | {4, 5})
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(autouse=True)
def ieee_division(monkeypatch):
    """On a GPU torch divides by a number by multiplying with its reciprocal; the format's scales are true quotients."""
    truth = reference.activation_int8_ref
    monkeypatch.setattr(reference, "activation_int8_ref", lambda x: tuple(t.to(x.device) for t in truth(x.cpu())))


def check(case, m, thresholds, dtype, device, *, path, config=None, bias=True, seed=0):
    """Integers exactly, outputs within their rounding, every row alone bit-equal; the reference runs where the kernel runs."""
    n, k = case.codes.shape
    x = make_rows(m, k, dtype, seed).to(device)
    thr = torch.tensor(THRESHOLDS[thresholds], device=device)
    b = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device, dtype) if bias else None
    packed, matrices = to_device(case.weight, device), case.matrices.to(device)
    w = prepare(packed, TRANSFORMS, ctas=getattr(config, "ctas", None))
    kwargs = {"path": path, "config": config}
    poison_allocator(device)
    assert torch.equal(decode_sums(x, w, thr, **kwargs).long(), reference.tile_sums_ref(x, packed, thr)), "integer sums"
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    y = decode_linear(x, w, b, thr, out=out, **kwargs)
    assert y is out
    wanted = reference.decode_bitplane_ref(x, packed, matrices, thr, b)
    if bool((wanted == 0).all()):
        assert torch.equal(y.double(), wanted)
    else:
        assert relative_rms(y, wanted) <= OUTPUT_RMS[str(dtype).removeprefix("torch.")]
    for row in {0, m // 2, m - 1}:
        alone = decode_linear(x[row : row + 1], w, b, thr, **kwargs)
        assert torch.equal(alone[0], y[row]), f"row {row} differs alone"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set")
@pytest.mark.parametrize(
    ("shape", "kind", "m", "thresholds", "dtype"),
    [
        ((64, 64), "all8", 1, "full", torch.float32),
        ((64, 128), "mixed2468", 2, "graded", torch.bfloat16),
        ((576, 64), "mixed48", 1, "skip2and6", torch.float16),
        ((64, 320), "all4", 1, "graded", torch.float32),
        ((64, 64), "mixed48", 1, "none", torch.float32),
    ],
)
def test_the_interpreter_runs_the_same_kernels(shape, kind, m, thresholds, dtype):
    check(make_case(*shape, kind), m, thresholds, dtype, "cpu", path="triton")


interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason="Triton with TRITON_INTERPRET=1"
)


@interpreted
def test_the_check_at_load_sees_a_wrong_kernel(monkeypatch):
    from vllm_tilequant.kernels import decode_triton

    cpu = torch.device("cpu")
    assert decode_bitplane.self_check(cpu, "triton") is None
    right = decode_triton.launch
    monkeypatch.setattr(decode_triton, "launch", lambda x, w, bias, t, out: (right(x, w, bias, t, out), out[-1, :64].zero_()))
    assert "wrong results for 1 rows" in decode_bitplane.self_check(cpu, "triton")


@interpreted
def test_the_check_at_load_runs_while_a_server_loads():
    with default_dtype(torch.bfloat16):
        assert decode_bitplane.self_check(torch.device("cpu"), "triton") is None


@interpreted
def test_a_gpu_without_clusters_is_served_by_triton(monkeypatch):
    """Compute capability 8.0, with the interpreter as its GPU: nothing may reach for the CUDA sources."""
    caches = (decode_bitplane.device_path, decode_bitplane._device_path, prefill_int8.device_path)
    for module in (decode_bitplane, dispatch, prefill_int8):
        monkeypatch.setattr(module, "device_capability", lambda device: (8, 0))
    for cache in caches:
        cache.cache_clear()
    case, called = make_case(576, 64), []
    monkeypatch.setattr(
        decode_bitplane, "decode_linear", lambda *a, **k: (called.append(a[2] is None), decode_linear(*a, **k))[1]
    )
    try:
        w = dispatch.prepare(case.weight, TRANSFORMS, torch.bfloat16, "group64")
        assert called == [True, False]  # compiled by calls, without and with bias
        thr = torch.tensor(THRESHOLDS["graded"])
        for m in (1, 9):
            x = make_rows(m, 64, torch.bfloat16)
            y = dispatch.tile_linear(x, w, None, thr, graded_rows=8, activation="group64")
            graded = reference.decode_bitplane_ref(x, case.weight, case.matrices, thr)
            wanted = graded if m == 1 else reference.linear_ref(x, case.weight, case.matrices, int8=True)
            assert relative_rms(y, wanted) <= OUTPUT_RMS["bfloat16"]
    finally:
        for cache in caches:
            cache.cache_clear()


def test_the_room_for_sums_grows_and_holds_zeros(monkeypatch):
    monkeypatch.setattr(decode_bitplane, "_rooms", {})
    device = torch.device("cpu")
    room = decode_bitplane.sums_room(device, 64)
    assert room.numel() == 64 and not room.any() and decode_bitplane.sums_room(device, 8) is room
    assert decode_bitplane.sums_room(device, 65).numel() == 65


@pytest.mark.gpu
def test_what_is_made_at_load_is_what_calls_use(monkeypatch):
    """A captured graph must meet neither the compiler nor a new room; a room that something was left in is cleared."""
    case, device = make_case(1088, 1536), torch.device("cuda")
    w = prepare(case.weight, TRANSFORMS, ctas=8).to(device)
    x, thr = make_rows(8, 1536, torch.bfloat16).cuda(), torch.tensor(THRESHOLDS["graded"], device=device)
    for config in (DecodeConfig(4, 3, stages=3, many=24), DecodeConfig(4, 3, stages=3), StreamConfig(8, 5)):
        monkeypatch.setattr(decode_bitplane, "decode_config", lambda *shape, config=config: config)
        for room in decode_bitplane._rooms.values():
            room.fill_(7)
        decode_bitplane.make_ready(w, x.dtype)
        compiled, rooms = decode_bitplane._module.cache_info().misses, dict(decode_bitplane._rooms)
        for m in (1, 2, 3, 8):
            assert torch.equal(decode_linear(x[:m], w, None, thr)[:1], decode_linear(x[:1], w, None, thr))
        assert decode_bitplane._module.cache_info().misses == compiled
        assert all(rooms[d] is room for d, room in decode_bitplane._rooms.items())
        for room in decode_bitplane._rooms.values():
            room.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
def test_the_check_at_load_passes(path):
    assert decode_bitplane.self_check(torch.device("cuda"), path) is None


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_maps_rows_and_levels(shape, kind, path):
    case = make_case(*shape, kind)
    rows = GPU_ROWS if path == "cuda" else (1, 3, 8)  # in Triton rows differ in nothing
    for i, m in enumerate(rows):
        for thresholds in list(THRESHOLDS)[i % 2 :: 2] + ["graded"]:
            check(case, m, thresholds, torch.bfloat16, "cuda", path=path)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_dtypes_and_bias(dtype, path):
    case = make_case(576, 1536)
    for m in (1, 3, 8):
        for bias in (True, False):
            check(case, m, "graded", dtype, "cuda", path=path, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 7, 8, 16])
@pytest.mark.parametrize("warps", [(1, 1), (3, 2), (8, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("tiles", [4, 8])
def test_every_cut_gives_the_same_integers(splits, warps, tiles):
    case = make_case(1088, 1536, "mixed2468")
    for m, stages in ((1, 4), (2, 3), (4, 4), (7, 6)):
        config = DecodeConfig(splits, *warps, tiles, stages, parts=2 if splits % 4 == 0 else 1, launch_from=5)
        check(case, m, "graded", torch.bfloat16, "cuda", path="cuda", config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("many", [3, 5, 7, 24, 47, 1000])
@pytest.mark.parametrize(("splits", "warps_k"), [(1, 1), (4, 3), (8, 3), (2, 8)])
def test_every_stretch_of_chains_gives_the_same_integers(many, splits, warps_k):
    """From CTAs with several blocks to one CTA a chain, and more than run at the same time: in the order of the clusters."""
    case = make_case(1088, 1536, "mixed2468")
    for m in (3, 4, 8):
        config = DecodeConfig(splits, warps_k, tiles=8, stages=3, launch_from=8, many=many)
        check(case, m, "graded", torch.bfloat16, "cuda", path="cuda", config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [DecodeConfig(4, 3, parts=2, launch_from=3), DecodeConfig(4, 3, launch_from=3, many=7), StreamConfig(5, 7, launch_from=3)],
    ids=["clusters", "stretches", "stream"],
)
def test_rows_of_a_launch_want_some_inputs_of_the_last_plane(config):
    """None, few (read one by one) and many of an input tile, in one launch after another over the same weight."""
    case = make_case(1088, 1536, "mixed2468")
    for m in (3, 4, 5, 8):
        for thresholds in ("graded", "full", "none"):
            check(case, m, thresholds, torch.bfloat16, "cuda", path="cuda", config=config)
    w = prepare(case.weight, TRANSFORMS, ctas=getattr(config, "ctas", None)).to("cuda")
    thr, y = torch.tensor(THRESHOLDS["graded"], device="cuda"), torch.empty(20, 8, 1088, dtype=torch.bfloat16, device="cuda")
    rows = [make_rows(8, 1536, torch.bfloat16, seed).cuda() for seed in range(20)]
    wanted = [decode_linear(x, w, None, thr, config=config, path="cuda") for x in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, out in zip(rows, y, strict=True):
            decode_linear(x, w, None, thr, config=config, path="cuda", out=out)
    for _ in range(5):
        y.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, right) for out, right in zip(y, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [2, 3, 5, 7, 24, 47, 1000])
@pytest.mark.parametrize(("chains", "stages"), [(4, 3), (7, 6), (14, 3)])
def test_every_cut_of_a_stream_gives_the_same_integers(ctas, chains, stages):
    """From CTAs with several blocks to one CTA an item; chains over the end of a block, and more of them than items."""
    case = make_case(1088, 1536, "mixed2468")
    parts = 2 if ctas % 2 == 0 and stages == 3 and 2 * chains <= 22 else 1  # two need twice the memory
    for m in (1, 2, 4, 7):
        config = StreamConfig(ctas, chains, stages, parts, launch_from=7)
        check(case, m, "graded", torch.bfloat16, "cuda", path="cuda", config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_streams_of_every_dtype_map_and_level(dtype):
    for shape, kind in (((64, 64), "all4"), ((192, 320), "all8"), ((576, 1536), "mixed48"), ((1088, 128), "all2")):
        case = make_case(*shape, kind)
        for m in (1, 2, 3, 8):
            for thresholds in THRESHOLDS:
                check(case, m, thresholds, dtype, "cuda", path="cuda", config=StreamConfig(5, 4, 3), bias=m != 2)


@pytest.mark.gpu
def test_a_chain_of_a_stream_may_cover_many_blocks():
    case = make_case(64 * 8 * 20 + 64, 128)
    for m in (1, 2, 3, 8):
        for ctas in (2, 3):
            check(case, m, "graded", torch.bfloat16, "cuda", path="cuda", config=StreamConfig(ctas, 4, 3))


@pytest.mark.gpu
def test_a_stream_at_the_size_of_a_model():
    case = make_case(4096, 14336)
    for config in (StreamConfig(128, 14, 3), StreamConfig(256, 7, 3, parts=2)):
        for m in (1, 3):
            check(case, m, "graded", torch.bfloat16, "cuda", path="cuda", config=config)


@pytest.mark.gpu
def test_a_stream_needs_room_in_its_weight():
    case, x = make_case(576, 1536), make_rows(1, 1536, torch.bfloat16).cuda()
    w, thr = prepare(case.weight, TRANSFORMS, ctas=6).to("cuda"), torch.tensor(THRESHOLDS["graded"], device="cuda")
    decode_linear(x, w, None, thr, path="cuda", config=StreamConfig(6))
    with pytest.raises(ValueError, match="prepare it with ctas=7"):
        decode_linear(x, w, None, thr, path="cuda", config=StreamConfig(7))
    for m in (1, 8):
        decode_linear(make_rows(m, 1536, torch.bfloat16).cuda(), w, None, thr, path="cuda", config=StreamConfig(6))
    room = decode_bitplane.sums_room(x.device, 1)
    assert not bool(w.arrivals.any()) and not bool(room.any())  # zeros between launches


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, StreamConfig(7, 5)], ids=["clusters", "stream"])
def test_replays_of_one_graph_follow_thresholds_and_inputs(config):
    case = make_case(576, 1536)
    w = prepare(case.weight, TRANSFORMS, ctas=getattr(config, "ctas", None)).to("cuda")
    x, thr = make_rows(2, 1536, torch.bfloat16).cuda(), torch.tensor(THRESHOLDS["graded"], device="cuda")
    decode_linear(x, w, None, thr, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_linear(x, w, None, thr, config=config)
    for name in THRESHOLDS:
        for seed in (1, 2):
            x.copy_(make_rows(2, 1536, torch.bfloat16, seed))
            thr.copy_(torch.tensor(THRESHOLDS[name]))
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, decode_linear(x, w, None, thr, config=config))


@pytest.mark.gpu
def test_a_nan_stays_in_its_row():
    case = make_case(192, 320)
    w = prepare(case.weight, TRANSFORMS).to("cuda")
    x, thr = make_rows(3, 320, torch.bfloat16).cuda(), torch.tensor(THRESHOLDS["graded"], device="cuda")
    clean = decode_linear(x, w, None, thr)
    x[1, 7] = float("nan")
    y = decode_linear(x, w, None, thr)
    assert bool(y[1].isnan().all()) and torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])
