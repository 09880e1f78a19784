"""The graded GEMV against Marlin, cuBLAS and CUTLASS INT8: every time in one run, in captured graphs, over rotated weights.

    python benchmarks/bench_decode_bitplane.py [--json PATH] [--shapes 4096x4096,...] [--recorded FILE] [--no-peers]

`us` is everything from activations to outputs: preparation, product, reduction, output rotation. Peers need vLLM; a peer that
cannot be measured is left out of the row and named at the end, never estimated. `--recorded` adds a row with real activations
and thresholds, of `record_activations.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import report
import shapes
import timing

from vllm_tilequant.kernels import decode_bitplane as kernel
from vllm_tilequant.kernels import layout, reference

MAX_RMS = 2.0**-8
ROWS_SHAPE = (28672, 4096)
#: `level` of the row with recorded activations.
RECORDED = "recorded"


def ours(n: int, k: int) -> list[kernel.DecodeWeight]:
    """One checked weight, and copies of its structure with other codes."""
    first = kernel.prepare(shapes.draw_weight(n, k, "cuda"), shapes.TRANSFORMS)
    g = torch.Generator("cuda").manual_seed(1)
    copies = timing.copies_needed(n * k * 2.2 / 8)
    return [first] + [
        dataclasses.replace(first, codes=shapes.draw_words(tuple(first.codes.shape), g)) for _ in range(copies - 1)
    ]


def measure(
    n: int, k: int, m: int, level: str, weights, packed, copy_gbps: float, *, path: str | None = None, recorded=None
) -> dict[str, Any]:
    """recorded: (rows, thresholds) instead of drawn ones."""
    if recorded:
        x, thr = recorded
    else:
        x = shapes.draw_rows(m, k, "cuda")
        thr = shapes.thresholds_counted(level, x[:1], packed.tile_bits)
    out = torch.full((m, n), float("nan"), dtype=x.dtype, device="cuda")
    kernel.decode_linear(x, weights[0], None, thr, out=out, path=path)
    matrices = shapes.TRANSFORMS.cuda()[packed.output_transform.long()]
    wanted = reference.decode_bitplane_ref(x, packed, matrices, thr)
    rms = float((out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    del wanted
    if not rms <= MAX_RMS:
        raise RuntimeError(f"[{n}, {k}] M {m} at {level}: relative RMS error {rms}; no time for a wrong result")
    calls = [lambda w=w: kernel.decode_linear(x, w, None, thr, out=out, path=path) for w in weights]
    t = timing.time_graph(calls)
    loaded = shapes.loaded_bits(x, thr, packed.tile_bits)
    read = n * k * loaded / 8 + weights[0].meta.nbytes + weights[0].factor.nbytes
    return {
        "N": n, "K": k, "M": m, "level": level, "stored_bits": layout.tile_code_bits(packed.tile_bits) / (n * k),
        "loaded_bits": loaded, "us": t.us, "us_prepare": None, "us_p20": t.us_p20, "us_p80": t.us_p80,
        "read_gbps": read / t.us / 1e3, "copy_gbps": copy_gbps, "rms_error": rms,
    }  # fmt: skip


def peers(n: int, k: int, m: int, missing: dict[str, str]) -> dict[str, float]:
    """µs of every rival at one shape; one that fails is named in `missing`."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = {}
    for name, make in {"bf16": _bf16, "marlin4": _marlin(4), "marlin8": _marlin(8), "cutlass_int8": _cutlass}.items():
        try:
            out[name] = timing.time_graph(make(x, n, k)).us
        except (ImportError, AttributeError, TypeError, RuntimeError) as e:  # a benchmark goes on without a rival, and says so
            missing[name] = f"{type(e).__name__}: {e}"[:300]
        torch.cuda.empty_cache()
    return out


def _bf16(x, n: int, k: int) -> list[Callable[[], object]]:
    weights = [torch.randn(n, k, dtype=x.dtype, device="cuda") for _ in range(timing.copies_needed(2 * n * k))]
    return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]


def _marlin(bits: int):
    def make(x, n: int, k: int) -> list[Callable[[], object]]:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (
            marlin_make_workspace_new,
            marlin_permute_scales,
        )
        from vllm.scalar_type import scalar_types

        kind = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[bits]
        g = torch.Generator("cuda").manual_seed(2)
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        weights = [
            ops.gptq_marlin_repack(shapes.draw_words((k * bits // 32, n), g), none, k, n, bits)
            for _ in range(timing.copies_needed(n * k * bits / 8))
        ]
        scales = marlin_permute_scales(torch.rand(k // 128, n, dtype=x.dtype, device="cuda") * 0.01, k, n, 128)
        workspace = marlin_make_workspace_new(torch.device("cuda"))
        return [
            lambda w=w: ops.marlin_gemm(
                x, None, w, None, scales, None, None, None, none, none, workspace, kind,
                size_m=x.shape[0], size_n=n, size_k=k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True,
                is_zp_float=False,
            )
            for w in weights
        ]  # fmt: skip

    return make


def _cutlass(x, n: int, k: int) -> list[Callable[[], object]]:
    from vllm import _custom_ops as ops

    weights = [
        torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda").t() for _ in range(timing.copies_needed(n * k))
    ]
    q = torch.randint(-127, 128, tuple(x.shape), dtype=torch.int8, device="cuda")
    a, b = torch.rand(x.shape[0], 1, device="cuda"), torch.rand(1, n, device="cuda")
    return [lambda w=w: ops.cutlass_scaled_mm(q, w, a, b, torch.bfloat16) for w in weights]


def bar(row: dict[str, Any]) -> float | None:
    """The ratio to Marlin 4-bit that the project asks for, None where it asks for none."""
    shape = (row["N"], row["K"])
    if row["level"] == RECORDED:
        return None
    if row["M"] > 1:
        return shapes.BARS_ROWS.get((row["M"], row["level"]))
    large, small = shapes.BARS[row["level"]]
    return large if shape in shapes.LARGE else small if shape in shapes.SMALL else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--shapes", help="N x K pairs, such as 4096x4096,28672x4096; default: all")
    parser.add_argument("--recorded", type=Path, help="file of record_activations.py: one more row, at 28672x4096")
    parser.add_argument("--no-peers", action="store_true", help="our times only")
    args = parser.parse_args()
    wanted = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else [*shapes.LARGE, *shapes.SMALL]
    copy, missing, rows = timing.copy_gbps(), {}, []
    print(f"copy bandwidth {copy:.0f} GB/s", flush=True)
    for n, k in wanted:
        packed, weights = shapes.draw_weight(n, k, "cuda"), ours(n, k)
        cases = [(1, level) for level in shapes.LEVEL_SHARES]
        cases += list(shapes.BARS_ROWS) if (n, k) == ROWS_SHAPE else []
        found = [measure(n, k, m, level, weights, packed, copy) for m, level in cases]
        if args.recorded and (n, k) == ROWS_SHAPE:
            data = load_file(args.recorded, device="cuda")
            real = data["rows"][:1].contiguous(), data["thresholds"]
            found.append(measure(n, k, 1, RECORDED, weights, packed, copy, recorded=real))
        triton = measure(n, k, 1, "3.0", weights, packed, copy, path="triton")["us"]
        del weights
        torch.cuda.empty_cache()
        rivals = {m: {} if args.no_peers else peers(n, k, m, missing) for m in sorted({m for m, _ in cases})}
        for row in found:
            row["peers_us"] = dict(rivals[row["M"]])
            if row["M"] == 1 and row["level"] == "3.0":
                row["us_triton"] = triton
            row["bar"] = bar(row)
            if "marlin4" in row["peers_us"]:
                row["ratio_marlin4"] = row["us"] / row["peers_us"]["marlin4"]
            rows.append(row)
            print_row(row)
    if args.json:
        report.write(args.json, report.envelope("decode_bitplane", "cuda", rows))
        print(f"wrote {args.json}")
    columns = {"N": "d", "K": "d", "M": "d", "level": "", "loaded_bits": ".2f", "us": ".2f", "us_p20": ".2f", "us_p80": ".2f"}
    columns |= {"read_gbps": ".0f", "rms_error": ".1e", "ratio_marlin4": ".3f", "bar": ".2f", "us_triton": ".1f"}
    print(report.table(rows, columns))
    for name, why in missing.items():
        print(f"not measured: {name}: {why}")


def print_row(row: dict[str, Any]) -> None:
    rivals = " ".join(f"{name} {us:.2f}" for name, us in row["peers_us"].items())
    ratio = f" ratio {row['ratio_marlin4']:.3f} (bar {row['bar']})" if "ratio_marlin4" in row else ""
    print(f"{row['N']}x{row['K']} M{row['M']} {row['level']}: {row['us']:.2f} us{ratio} | {rivals}", flush=True)


if __name__ == "__main__":
    main()
