"""INT8 rows, levels, channel lists and midpoint constants, exactly as the references say. On a GPU, or Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from cases import THRESHOLDS, make_rows

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from vllm_tilequant.kernels import reference
from vllm_tilequant.kernels.activation_int8 import prepare_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize(
    ("m", "k", "dtype"), [(1, 64, torch.float32), (3, 192, torch.bfloat16), (2, 128, torch.float16)], ids=str
)
def test_everything_equals_the_reference(m, k, dtype, name):
    x, thresholds = make_rows(m, k, dtype), torch.tensor(THRESHOLDS[name])
    got = prepare_rows(x.to(DEVICE), thresholds.to(DEVICE))
    q, scale = reference.activation_int8_ref(x)
    levels = reference.levels_ref(x, thresholds)
    assert torch.equal(got.q.cpu(), q) and torch.equal(got.scale.cpu(), scale) and torch.equal(got.levels.cpu(), levels)
    for row in range(m):
        for kt in range(k // 64):
            part, codes = levels[row, 64 * kt : 64 * kt + 64].long(), q[row, 64 * kt : 64 * kt + 64].long()
            for p in range(4):
                wanted = (part > 2 * p).nonzero().flatten()
                n, last = len(wanted), int(wanted[-1]) if len(wanted) else 0
                channels = torch.full((64,), last)
                values = torch.zeros(64, dtype=torch.long)
                channels[:n], values[:n] = wanted, codes[wanted]
                assert int(got.counts[row, kt, p]) == -(-n // 4)
                assert torch.equal(got.channels[row, kt, p].cpu().long(), channels)
                assert torch.equal(got.values[row, kt, p].cpu().long(), values)
            for b in (2, 4, 6, 8):
                middle = (256 >> part.clamp_max(b)) - (256 >> b) - 256
                assert int(got.centre[row, kt, b // 2 - 1]) == int((codes * middle)[part > 0].sum())


def test_bad_input_is_refused():
    x, thresholds = torch.zeros(1, 64, device=DEVICE), torch.zeros(4, device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        prepare_rows(x.double(), thresholds)
    with pytest.raises(ValueError, match="wanted"):
        prepare_rows(x[:, :40], thresholds)
    with pytest.raises(ValueError, match="thresholds"):
        prepare_rows(x, thresholds[:3])
