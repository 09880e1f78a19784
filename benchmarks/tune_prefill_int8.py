"""Search configurations of the prefill and write them to `configs/tuning/<gpu>.json`.

    python benchmarks/tune_prefill_int8.py [--shapes 4096x4096,...] [--write]

A shape's figure is the sum over numbers of rows of log(time), each by the fastest of the three ways; `splits` is chosen by it.
`short_rows` is the largest number of rows up to which the short kernel is never slower than both others, and `batch_rows` that
up to which the kernel for batches is never slower than expanding.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import bench_prefill_int8 as bench
import shapes

from vllm_tilequant import ops
from vllm_tilequant.kernels import tuning
from vllm_tilequant.kernels.tuning import PrefillConfig

ROWS = (9, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HOW = {"replays": 8, "warmup": 2, "at_least": 10}


def tune(n: int, k: int) -> PrefillConfig:
    b, gemm = bench.draw(n, k), ops.int8_gemm(torch.device("cuda"))
    x = {m: shapes.draw_rows(m, k, "cuda") for m in ROWS}

    def us(config: PrefillConfig) -> dict[int, float]:
        return {m: bench.time_ours(b, x[m], config, gemm, **HOW).us for m in ROWS}

    long, batch = us(PrefillConfig(1, 0)), us(PrefillConfig(1, 0, 10**6))
    other = {m: min(long[m], batch[m]) for m in ROWS}
    short = {s: us(PrefillConfig(s, 10**6)) for s in SPLITS}
    splits = min(short, key=lambda s: sum(math.log(min(short[s][m], other[m])) for m in ROWS))
    for name, times in (("long", long), ("batch", batch), (f"short, {splits} splits", short[splits])):
        print(f"{n}x{k} {name}:", " ".join(f"M{m} {t:.1f}" for m, t in times.items()), flush=True)
    return PrefillConfig(splits, last_not_slower(short[splits], other), last_not_slower(batch, long))


def last_not_slower(times: dict[int, float], others: dict[int, float]) -> int:
    """The largest number of rows up to which `times` are never above `others`, at least 8 (which are graded)."""
    slower = [m for m in times if times[m] > others[m]]
    return max([8] + [m for m in times if not slower or m < slower[0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="N x K pairs, such as 4096x4096,28672x4096; default: those of the benchmark")
    parser.add_argument("--write", action="store_true", help="write the tuning file of this GPU")
    args = parser.parse_args()
    wanted = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else bench.SHAPES
    best = {}
    for n, k in wanted:
        best[n, k] = tune(n, k)
        print(n, k, best[n, k], flush=True)
        torch.cuda.empty_cache()
    if args.write:
        gpu = tuning.gpu_key(torch.cuda.get_device_properties("cuda").name)
        path = Path(__file__).resolve().parent.parent / "configs" / "tuning" / f"{gpu}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = tuning.tuned_prefill(gpu) | best
        path.write_text(tuning.dump(gpu, tuning.tuned(gpu), {"torch": torch.__version__}, found))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
