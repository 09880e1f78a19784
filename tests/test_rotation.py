"""The rotation of inputs as a kernel: the reference's bits. On a GPU, or Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from cases import make_rows
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import Transform

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from vllm_tilequant.kernels import rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = layout.rotation_table(Transform(kind="randomized_hadamard", seed=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 64), (3, 192), (2, 320), (17, 128)])
def test_every_bit_is_the_reference_s(m, k, dtype):
    x = make_rows(m, k, dtype)
    got = rotation.rotate_rows(x.to(DEVICE), TABLE.to(DEVICE)).cpu()
    assert torch.equal(got, layout.rotate_inputs(x, TABLE))


def test_no_rows_and_bad_input():
    table = TABLE.to(DEVICE)
    assert rotation.rotate_rows(torch.empty(0, 64, device=DEVICE), table).shape == (0, 64)
    with pytest.raises(TypeError, match="float64"):
        rotation.rotate_rows(torch.zeros(1, 64, dtype=torch.float64, device=DEVICE), table)
    with pytest.raises(ValueError, match="wanted"):
        rotation.rotate_rows(torch.zeros(1, 40, device=DEVICE), table)
    with pytest.raises(ValueError, match="contiguous"):
        rotation.rotate_rows(torch.zeros(64, 2, device=DEVICE).T, table)
    with pytest.raises(ValueError, match="table"):
        rotation.rotate_rows(torch.zeros(1, 64, device=DEVICE), table[:3])
