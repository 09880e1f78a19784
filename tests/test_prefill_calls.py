"""Calls whose launches are made once ask the driver for what `prefill_linear` asks for. A stand-in for the driver, no GPU."""

import ctypes
import types
from importlib.util import find_spec

import pytest
import torch

from cases import TRANSFORMS, make_case
from vllm_tilequant.kernels import cuda_runtime, decode_weight, prefill_batch, prefill_cuda, prefill_int8
from vllm_tilequant.kernels.tuning import Multiprocessors, PrefillConfig

#: Where rows and what comes of them lie, another place in every call.
PLACES = {"x", "q", "scale", "y"}


def plain(struct):
    """The fields of a structure by name, but for `PLACES` and padding."""
    found = {}
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        if name not in PLACES | {"padding"}:
            found[name] = plain(value) if isinstance(value, ctypes.Structure) else value
            found[name] = bytes(value) if isinstance(value, ctypes.Array) else found[name]
    return found


@pytest.fixture
def asked(monkeypatch):
    """What launches asked for, in order."""
    seen = []
    kinds = {"batch_rows": prefill_batch.BatchRows, "batch": prefill_batch.BatchArgs, "expand": prefill_cuda.ExpandArgs}

    def launch(pointer, handle, parameters, extra):
        config, (source, defines, name) = pointer._obj, handle
        kind = kinds[name]
        args = kind.from_buffer_copy(ctypes.string_at(parameters[0], ctypes.sizeof(kind)))
        seen.append(
            (source, defines, name, list(config.grid), list(config.block), config.shared_bytes, config.count, plain(args))
        )
        return 0

    def module(source, device, defines):
        def kernel(name):
            found = cuda_runtime.Kernel.__new__(cuda_runtime.Kernel)
            found.handle, found.name, found._requests = (source, tuple(defines), name), name, {}
            found.prefer_shared = lambda: None
            return found

        return types.SimpleNamespace(kernel=kernel)

    def empty(rows, columns, dtype, device):
        return torch.empty(rows, columns, dtype=dtype, device=device)

    gpu = Multiprocessors(132, 233472, 232448)
    monkeypatch.setattr(cuda_runtime, "driver", lambda: types.SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(prefill_int8, "device_path", lambda device: "cuda")
    for where in (prefill_batch, prefill_cuda):
        monkeypatch.setattr(where, "module", module)
        monkeypatch.setattr(where, "multiprocessors", lambda device: gpu)
        monkeypatch.setattr(where, "current_stream", lambda device: 0)
        monkeypatch.setattr(where, "empty_rows", empty)
    monkeypatch.setattr(prefill_batch, "planes_map", lambda w, tiles: bytes([tiles]) * 128)
    monkeypatch.setattr(prefill_batch, "clusters_at_once", lambda device, dtype, tokens, width, parts: 132 // parts)
    caches = (prefill_batch._batch_module, prefill_batch._batch_rows_module, prefill_batch._shared)
    caches += (prefill_batch._many, prefill_cuda._expand_module)
    for cache in caches:
        cache.cache_clear()
    yield seen
    for cache in caches:
        cache.cache_clear()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (64, 64), (1088, 320)])
@pytest.mark.parametrize("smooth", [False, True])
def test_calls_made_once_ask_for_the_same_launches(asked, monkeypatch, n, k, smooth):
    monkeypatch.setattr(prefill_int8, "prefill_config", lambda n, k, device: PrefillConfig(1, 8, 600))
    packed = make_case(n, k).weight
    w = decode_weight.prepare(packed, TRANSFORMS)
    p = prefill_int8.prepare(packed, w, smoothing=torch.rand(k) + 0.5 if smooth else None)

    def gemm(q, codes, scale, unit, bias, dtype):
        asked.append((q.shape, codes.data_ptr(), scale.shape, unit.data_ptr(), bias, dtype))
        return q.new_empty((q.shape[0], codes.shape[0]), dtype=dtype)

    for dtype in (torch.bfloat16, torch.float16):
        call = prefill_int8.Call(w, p, dtype, "token_smooth", gemm)
        for m in (9, 17, 64, 65, 128, 129, 256, 257, 500, 601):
            x = torch.zeros(m, k, dtype=dtype)
            for bias in (None, torch.zeros(n, dtype=dtype)):
                asked.clear()
                y = prefill_int8.prefill_linear(x, w, p, bias, gemm=gemm)
                wanted = list(asked)
                asked.clear()
                made = call(x, p.scale, bias)
                several = k // 64 % 2 and 128 < m <= 600  # launches of 128 rows
                assert asked == wanted and len(wanted) == (1 + -(-m // 128) if several else 2)
                assert (made.shape, made.dtype, made.stride()) == (y.shape, y.dtype, y.stride())
        assert call(torch.zeros(8, k, dtype=dtype), p.scale, None) is None
