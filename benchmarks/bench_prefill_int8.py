"""The INT8 prefill against cuBLAS bf16, CUTLASS INT8 and Marlin, all in one run, in captured graphs, over rotated weights.

    python benchmarks/bench_prefill_int8.py [--json PATH] [--shapes 4096x4096,...] [--rows 16,2048,...] [--no-peers]

`us` is everything from activations to outputs: rows (`us_prepare`), expansion (`us_expand`), product. With vLLM installed
the long product goes through its CUTLASS INT8 op as in serving, otherwise through ours in Triton; `gemm` says which. Peers need
vLLM; one that cannot be measured is left out of the row and named at the end, never estimated.
Few rows come first, at all shapes, and everything timed, ours and the rivals', begins after a rest: behind large products a GPU
that is limited by its power runs at three quarters of its clock for some tenths of a second (one H200: 1,500 MHz for 1,980).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import bench_decode_bitplane as decode
import report
import shapes
import timing

from vllm_tilequant import ops
from vllm_tilequant.kernels import layout, prefill_batch, prefill_int8, prefill_triton, reference
from vllm_tilequant.kernels.decode_weight import DecodeWeight
from vllm_tilequant.kernels.layout import PackedWeight
from vllm_tilequant.kernels.prefill_int8 import PrefillWeight
from vllm_tilequant.kernels.tuning import PrefillConfig, prefill_config

MAX_RMS = 2.0**-8
REST_SECONDS = 0.1
#: N x K: gate+up, down, qkv and o of an 8B model.
SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
ROWS = (16, 64, 128, 256, 512, 2048, 8192)
#: Bars of the ratio to bf16, in the order of `SHAPES`.
BARS = {
    8192: (0.60, 0.66, 0.62, 0.62),
    2048: (0.65, 0.70, 0.80, 0.78),
    512: (0.88, 0.95, 1.1, 1.1),
    **dict.fromkeys((128, 64, 16), (0.70, 0.75, 1.0, 1.0)),
}
PEERS = {"bf16": decode._bf16, "marlin4": decode._marlin(4), "cutlass_int8": decode._cutlass}


@dataclasses.dataclass(frozen=True)
class Bench:
    """A checked weight, and copies of its structure with other codes."""

    packed: PackedWeight
    prefill: PrefillWeight
    weights: list[DecodeWeight]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.out_features, self.packed.in_features


def draw(n: int, k: int) -> Bench:
    packed = shapes.draw_weight(n, k, "cuda")
    weights = decode.ours(n, k)
    smoothing = torch.exp(torch.randn(k, generator=torch.Generator().manual_seed(5)) * 0.5).cuda()
    return Bench(packed, prefill_int8.prepare(packed, weights[0], smoothing=smoothing), weights)


def effort(us: float) -> dict[str, int]:
    """How often to run what takes about `us`: some 40 ms in all, ten replays at least."""
    return {"replays": 10, "warmup": 2, "at_least": max(2, min(40, int(4000 / us)))}


def rest() -> None:
    """Until the clock is up again, after whatever ran before."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)


def check(bench: Bench, x: torch.Tensor, config: PrefillConfig, gemm: prefill_int8.Gemm | None, path: str | None) -> float:
    """Relative RMS error of one call; raises `RuntimeError` where it is beyond `MAX_RMS`."""
    m, (n, k) = x.shape[0], bench.shape
    out = None if gemm is not None else torch.full((m, n), float("nan"), dtype=x.dtype, device="cuda")
    prefill_int8.workspace(x.device, n, k).fill_(-128)
    y = prefill_int8.prefill_linear(x, bench.weights[0], bench.prefill, config=config, gemm=gemm, path=path, out=out)
    matrices = shapes.TRANSFORMS.cuda()[bench.packed.output_transform.long()]
    how = prefill_int8.way(x, config, "token_smooth", path or prefill_int8.device_path(x.device))
    if how == "short":
        wanted = reference.linear_ref(x, bench.packed, matrices, int8=True)
    elif how == "batch":
        wanted = reference.prefill_block_ref(x, bench.packed, matrices, smoothing=bench.prefill.smoothing)
    else:
        wanted = reference.prefill_int8_ref(x, bench.packed, matrices, smoothing=bench.prefill.smoothing)
    rms = float((y.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    if not rms <= MAX_RMS:
        raise RuntimeError(f"[{n}, {k}] M {m} {config}: relative RMS error {rms}; no time for a wrong result")
    return rms


def time_ours(bench: Bench, x: torch.Tensor, config: PrefillConfig, gemm, path: str | None = None, **how: int) -> timing.Timing:
    """Over as many weights as caches ask for beside what else a call passes through, and no more: a graph that is longer than
    those of the rivals finds the GPU at lower clocks."""
    (m, k), n = x.shape, bench.shape[0]
    others = m * (3 * k + 2 * n) + n * k
    copies = max(2, -(-(timing.ROTATE_BYTES - others) // bench.weights[0].codes.nbytes))
    calls = [
        lambda w=w: prefill_int8.prefill_linear(x, w, bench.prefill, config=config, gemm=gemm, path=path)
        for w in bench.weights[:copies]
    ]
    return timing.time_graph(calls, **how)


def prepare_us(bench: Bench, x: torch.Tensor, how: str) -> tuple[float, float | None]:
    """What comes before the product: rows, and the expansion. One launch does both: rows are what it takes more for them."""
    if how == "batch":
        return timing.time_graph([lambda: prefill_batch.quantize_batch(x, bench.prefill.unsmoothing)], replays=10).us, None
    if how == "short":
        return timing.time_graph([lambda: prefill_triton.quantize_groups(x)], replays=10).us, None
    p, path, out = bench.prefill, prefill_int8.device_path(x.device), prefill_int8.workspace(x.device, *bench.shape)

    def us(rows: torch.Tensor) -> float:
        calls = [lambda w=w: prefill_int8.quantize_and_expand(rows, w, p, None, out, path) for w in bench.weights]
        return timing.time_graph(calls, replays=10).us

    alone = us(x[:1])
    return us(x) - alone, alone


def measure(bench: Bench, m: int, copy_gbps: float) -> dict[str, Any]:
    n, k = bench.shape
    x, config = shapes.draw_rows(m, k, "cuda"), prefill_config(n, k, torch.device("cuda"))
    how = prefill_int8.way(x, config, "token_smooth", prefill_int8.device_path(x.device))
    gemm = ops.int8_gemm(x.device) if how == "long" else None
    rms = check(bench, x, config, gemm, None)
    torch.cuda.empty_cache()
    rest()
    t = time_ours(bench, x, config, gemm, **effort(n * k * m * 1e-9 + 20))
    rows_us, expand_us = prepare_us(bench, x, how)
    stored = layout.tile_code_bits(bench.packed.tile_bits) / (n * k)
    read = n * k * stored / 8 + bench.weights[0].meta.nbytes + bench.weights[0].factor.nbytes
    return {
        "N": n, "K": k, "M": m, "stored_bits": stored, "loaded_bits": stored, "kernel": how,
        "gemm": None if how != "long" else "cutlass" if gemm else "triton", "us": t.us,
        "us_prepare": rows_us, "us_expand": expand_us, "us_p20": t.us_p20, "us_p80": t.us_p80,
        "read_gbps": read / t.us / 1e3, "copy_gbps": copy_gbps, "rms_error": rms,
    }  # fmt: skip


def peers(n: int, k: int, m: int, missing: dict[str, str]) -> dict[str, float]:
    """µs of every rival at one shape; one that fails is named in `missing`."""
    x, out = shapes.draw_rows(m, k, "cuda"), {}
    for name, make in PEERS.items():
        try:
            calls: list[Callable[[], object]] = make(x, n, k)
            rest()
            out[name] = timing.time_graph(calls, **effort(n * k * m * 2e-9 + 20)).us
        except (ImportError, AttributeError, TypeError, RuntimeError) as e:  # a benchmark goes on without a rival, and says so
            missing[name] = f"{type(e).__name__}: {e}"[:300]
        torch.cuda.empty_cache()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--shapes", help="N x K pairs, such as 4096x4096,28672x4096; default: all")
    parser.add_argument("--rows", help="numbers of rows, such as 16,2048; default: all")
    parser.add_argument("--no-peers", action="store_true", help="our times only")
    args = parser.parse_args()
    wanted = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else list(SHAPES)
    counts = list(map(int, args.rows.split(","))) if args.rows else list(ROWS)
    copy, missing, rows = timing.copy_gbps(), {}, []
    print(f"copy bandwidth {copy:.0f} GB/s", flush=True)
    benches = [draw(n, k) for n, k in wanted]
    for m in sorted(counts):
        found = [measure(bench, m, copy) for bench in benches]
        for row in found:
            n, k = row["N"], row["K"]
            row["peers_us"] = {} if args.no_peers else peers(n, k, m, missing)
            at = SHAPES.index((n, k)) if (n, k) in SHAPES else None
            row["bar"] = BARS[row["M"]][at] if at is not None and row["M"] in BARS else None
            for name in ("bf16", "cutlass_int8"):
                if name in row["peers_us"]:
                    row[f"ratio_{name}"] = row["us"] / row["peers_us"][name]
            rows.append(row)
            rivals = " ".join(f"{name} {us:.1f}" for name, us in row["peers_us"].items())
            print(f"{n}x{k} M{row['M']} {row['kernel']}: {row['us']:.1f} us (bar {row['bar']}) | {rivals}", flush=True)
    rows.sort(key=lambda row: (wanted.index((row["N"], row["K"])), row["M"]))
    if args.json:
        report.write(args.json, report.envelope("prefill_int8", "cuda", rows))
        print(f"wrote {args.json}")
    columns = {"N": "d", "K": "d", "M": "d", "kernel": "", "us": ".1f", "us_prepare": ".1f", "us_p20": ".1f", "us_p80": ".1f"}
    columns |= {"rms_error": ".1e", "ratio_bf16": ".2f", "bar": ".2f", "ratio_cutlass_int8": ".2f"}
    print(report.table(rows, columns))
    for name, why in missing.items():
        print(f"not measured: {name}: {why}")


if __name__ == "__main__":
    main()
