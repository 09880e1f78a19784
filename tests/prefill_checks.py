"""What tests of the prefill share: a weight as it is served, and one call against its reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from cases import TRANSFORMS, make_rows
from tolerances import OUTPUT_RMS, poison_allocator, relative_rms
from vllm_tilequant.kernels import decode_weight, prefill_int8, reference
from vllm_tilequant.kernels.layout import to_device
from vllm_tilequant.kernels.tuning import PrefillConfig

#: Short up to 40 rows, long beyond.
CONFIG = PrefillConfig(splits=1, short_rows=40)


def draw_smoothing(k):
    return torch.exp(torch.randn(k, dtype=torch.float32, generator=torch.Generator().manual_seed(5)) * 0.7)


def served(case, device, smooth):
    packed = to_device(case.weight, device)
    smoothing = draw_smoothing(packed.in_features).to(device) if smooth else None
    w = decode_weight.prepare(packed, TRANSFORMS)
    return packed, w, prefill_int8.prepare(packed, w, smoothing=smoothing)


def check(case, m, dtype, device, *, path, activation="token_smooth", smooth=False, bias=True, config=CONFIG, gemm=None):
    n, k = case.codes.shape
    packed, w, p = served(case, device, smooth)
    x = make_rows(m, k, dtype).to(device)
    b = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device, dtype) if bias else None
    kwargs = {"activation": activation, "path": path, "config": config}
    poison_allocator(device)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device) if gemm is None else None
    y = prefill_int8.prefill_linear(x, w, p, b, out=out, gemm=gemm, **kwargs)
    how = prefill_int8.way(x, config, activation, path)
    matrices = case.matrices.to(device)
    if how == "short":
        wanted = reference.linear_ref(x, packed, matrices, b, int8=True)
    elif how == "batch":
        wanted = reference.prefill_block_ref(x, packed, matrices, b, smoothing=p.smoothing)
    else:
        codes, scale = reference.requantize_ref(packed, matrices, p.smoothing)
        assert torch.equal(p.scale[:, 0], scale)
        assert torch.equal(prefill_int8.workspace(x.device, n, k), codes), "requantised codes"
        wanted = reference.prefill_int8_ref(x, packed, matrices, b, smoothing=p.smoothing)
    if not wanted.any():
        assert torch.equal(y.double(), wanted)
    else:
        assert relative_rms(y, wanted) <= OUTPUT_RMS[str(dtype).removeprefix("torch.")]
    if gemm is None and not (
        how == "short" and device == "cpu"
    ):  # numpy, which the interpreter un-rotates with, promises no order
        for row in {0, m // 2, m - 1}:  # alone, on the same side of the boundary
            alone = replace(config, short_rows=0, batch_rows=0) if how == "long" else config
            got = prefill_int8.prefill_linear(x[row : row + 1], w, p, b, **(kwargs | {"config": alone}))
            assert torch.equal(got[0], y[row]), f"row {row} differs alone"
