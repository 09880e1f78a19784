"""What the graded kernels can run, asked without raising: `unsupported_reason(spec)` is None or one line that says why not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

#: Rows of one graded product.
MAX_ROWS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Compute capabilities from which a path runs: dp4a with Triton; clusters and distributed shared memory in CUDA C++.
TRITON_CAPABILITY = (8, 0)
CUDA_CAPABILITY = (9, 0)
PATHS = ("cuda", "triton")


@dataclass(frozen=True)
class DecodeSpec:
    """A graded product before it is built. capability: of the GPU, None where there is none."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    capability: tuple[int, int] | None
    rows: int = MAX_ROWS


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device of NVIDIA's, None for every other device."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def unsupported_reason(spec: DecodeSpec, path: str | None = None) -> str | None:
    """Why no graded kernel (or not the one of `path`) can serve `spec`; None when one can."""
    n, k = spec.out_features, spec.in_features
    if n % 64 or k % 64 or n <= 0 or k <= 0:
        return f"weight [{n}, {k}] is not a multiple of 64 on both axes"
    if spec.dtype not in DTYPES:
        return f"activations are {spec.dtype}, wanted one of {', '.join(map(str, DTYPES))}"
    if not 1 <= spec.rows <= MAX_ROWS:
        return f"{spec.rows} rows, wanted 1 to {MAX_ROWS}; larger batches take the prefill path"
    if spec.capability is None:
        return "no CUDA GPU; the portable path serves"
    if spec.capability < TRITON_CAPABILITY:
        return f"GPU of compute capability {_dotted(spec.capability)}, wanted at least 8.0; the portable path serves"
    reasons = {p: _path_reason(p, spec.capability) for p in PATHS}
    if path is not None:
        return reasons[path]
    return None if None in reasons.values() else "; ".join(f"{p}: {r}" for p, r in reasons.items())


def choose_path(capability: tuple[int, int] | None) -> str | None:
    """The faster graded kernel that can run on this GPU, None for none."""
    if capability is None or capability < TRITON_CAPABILITY:
        return None
    return next((p for p in PATHS if _path_reason(p, capability) is None), None)


def _path_reason(path: str, capability: tuple[int, int]) -> str | None:
    if path == "triton":
        return None if find_spec("triton") else "triton is not installed"
    if capability < CUDA_CAPABILITY:
        return f"compute capability {_dotted(capability)}, wanted at least 9.0 for thread block clusters"
    from vllm_tilequant.kernels.cuda_runtime import nvrtc

    return None if nvrtc() else f"no NVRTC library for CUDA {torch.version.cuda}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
