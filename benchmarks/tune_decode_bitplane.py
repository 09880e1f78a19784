"""Search launch configurations of the graded GEMV and write `configs/tuning/<gpu>.json`.

    python benchmarks/tune_decode_bitplane.py [--shapes 4096x4096,...] [--streams] [--write]

A configuration must serve every number of rows (bit-equality asks for one order of additions per weight), so its figure is a
weighted mean of its times relative to the best, over several levels at one row and over more rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes
import timing

from vllm_tilequant.kernels import decode_bitplane as kernel
from vllm_tilequant.kernels import tuning

#: (rows, level) -> weight in the figure of merit.
CASES = {(1, "3.0"): 4, (1, "4.0"): 2, (1, "2.2"): 1, (1, "full"): 1, (2, "3.0"): 1, (4, "3.0"): 1, (8, "3.0"): 1}
#: CTAs of a stream to a multiprocessor.
MOST_RESIDENT = 4
WARPS_N = (1, 2, 3, 4, 5, 6, 7, 8, 10, 14)


def cuts(k: int) -> list[tuple[int, int]]:
    """(splits, warps_k) that leave few warps idle."""
    out = []
    for splits, warps_k in itertools.product((1, 2, 4, 5, 7, 8, 14, 16), range(1, 17)):
        per_warp = math.ceil(k // 64 / (splits * warps_k))
        if k // 64 / (per_warp * splits * warps_k) >= 0.85 and per_warp <= 16:
            out.append((splits, warps_k))
    return out


def candidates(n: int, k: int, shared_limit: int, stages=(4,), least_warps: int = 800) -> list[tuning.DecodeConfig]:
    """Configurations for one row that fit shared memory and have warps enough to fill the GPU."""
    out = []
    for splits, warps_k in cuts(k):
        for warps_n, tiles, depth in itertools.product(WARPS_N, (4, 8), stages):
            warps = warps_n * warps_k
            if not 3 <= warps <= 16 or n / (64 * tiles) * splits * warps_k < least_warps:
                continue
            config = tuning.DecodeConfig(splits, warps_k, warps_n, tiles, depth)
            if tuning.cuda_geometry(1, n // 64, k // 64, config).shared_bytes <= shared_limit:
                out.append(config)
    return out


def stream_candidates(n: int, k: int, gpu: tuning.Multiprocessors, stages=(4,)) -> list[tuning.StreamConfig]:
    """Streams of 1 to 4 CTAs a multiprocessor that all fit it at the same time, in chains of equal length: of as many CTAs as
    there are places, and of the fewest (an even number) that have no longer chains."""
    items, out = math.ceil(n / 512) * (k // 64), []
    for resident, chains, depth, parts in itertools.product(range(1, MOST_RESIDENT + 1), range(4, 23), stages, (1, 2)):
        places = gpu.count * resident
        most = math.ceil(items / places)
        if (
            places > items
            or resident * chains > 24
            or chains * parts > 22
            or resident % parts
            or (chains > 4 and math.ceil(most / chains) == math.ceil(most / (chains - 1)))
        ):
            continue
        fewest = 2 * math.ceil(items / (2 * chains * math.ceil(most / chains)))
        for ctas in sorted({min(fewest, places), places}):
            config = tuning.StreamConfig(ctas, chains, depth, parts)
            if not tuning.fits(n, k, config, gpu):
                continue
            cut = tuning.stream_geometry(1, n // 64, k // 64, config, gpu)
            if cut.shared_bytes <= gpu.shared_bytes // (resident // parts) - 1024:
                out.append(config)
    return out


def best_many(n: int, k: int, config: tuning.DecodeConfig, weights, gpu: tuning.Multiprocessors) -> tuning.DecodeConfig | None:
    """The same order of additions with the best cut for more than two rows; None if there is none."""
    choices = [
        dataclasses.replace(config, parts=parts, launch_from=rows)
        for parts, rows in itertools.product((1, 2), (3, 5, 9))
        if config.splits % parts == 0
    ]
    blocks = math.ceil(n / 512)
    whole = {blocks * config.splits // parts for parts in (1, 2)}  # CTAs that leave one or two sums each
    choices += [
        dataclasses.replace(config, many=many, launch_from=rows)
        for many, rows in itertools.product(sorted({gpu.count, *whole}), (3, 5, 9))
        if gpu.count // 2 <= many <= min(2 * gpu.count, blocks * config.splits * config.warps_k)
    ]
    fit = [c for c in choices if tuning.fits(n, k, c, gpu)]
    return min(fit, key=lambda c: sum(measure_one(n, k, m, "3.0", c, weights) for m in (4, 8)), default=None)


def measure(n: int, k: int, config: tuning.DecodeConfig | tuning.StreamConfig, weights, cases) -> dict[tuple[int, str], float]:
    return {(m, level): measure_one(n, k, m, level, config, weights) for m, level in cases}


def measure_one(n: int, k: int, m: int, level: str, config: tuning.DecodeConfig | tuning.StreamConfig, weights) -> float:
    x, thr = shapes.draw_rows(m, k, "cuda"), shapes.thresholds_for(level).cuda()
    y = torch.empty(m, n, dtype=x.dtype, device="cuda")
    calls = [lambda w=w: kernel.decode_linear(x, w, None, thr, config=config, out=y, path="cuda") for w in weights]
    return timing.time_graph(calls, replays=10).us


def rotation(n: int, k: int, bits: float):
    """Copies of one weight's structure with other codes, enough to defeat the L2 at `bits` loaded bits."""
    ctas = MOST_RESIDENT * tuning.multiprocessors(torch.device("cuda", 0)).count  # room for any of the streams
    first = kernel.prepare(shapes.draw_weight(n, k, "cuda"), shapes.TRANSFORMS, ctas=ctas)
    g = torch.Generator("cuda").manual_seed(1)
    others = [
        dataclasses.replace(
            first,
            codes=shapes.draw_words(tuple(first.codes.shape), g),
        )
        for _ in range(timing.copies_needed(n * k * bits / 8) - 1)
    ]
    return [first, *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="N x K pairs, such as 4096x4096,28672x4096; default: the benchmark's")
    parser.add_argument("--first", default="3.0", help="the level at one row by which the field is narrowed")
    parser.add_argument("--keep", type=int, default=6, help="configurations that are measured at every case")
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 4], help="ring depths to try")
    parser.add_argument("--streams", action="store_true", help="try the streaming kernels as well")
    parser.add_argument("--write", action="store_true", help="write configs/tuning/<gpu>.json")
    parser.add_argument("--show", type=int, default=3, help="configurations of each shape to print")
    args = parser.parse_args()
    wanted = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else [*shapes.LARGE, *shapes.SMALL]
    gpu, best = tuning.multiprocessors(torch.device("cuda", 0)), {}
    for n, k in wanted:
        weights = rotation(n, k, 2.2)
        found = []
        choices: list[tuning.DecodeConfig | tuning.StreamConfig] = [*candidates(n, k, gpu.cta_bytes, stages=tuple(args.stages))]
        if args.streams:
            choices += stream_candidates(n, k, gpu, tuple(args.stages))
        for config in choices:
            try:
                found.append((measure_one(n, k, 1, args.first, config, weights), config))
            except RuntimeError as e:  # a cluster that this GPU cannot place
                print(f"{n}x{k} {config}: {e}", flush=True)
        found.sort(key=lambda f: f[0])
        rows = []
        for _, config in found[: args.keep]:
            if isinstance(config, tuning.StreamConfig) or (config := best_many(n, k, config, weights, gpu)):
                rows.append((config, measure(n, k, config, weights, CASES)))
        floor = {case: min(times[case] for _, times in rows) for case in CASES}
        merit = [sum(weight * times[c] / floor[c] for c, weight in CASES.items()) for _, times in rows]
        for (config, times), figure in sorted(zip(rows, merit, strict=True), key=lambda r: r[1])[: args.show]:
            cells = " ".join(f"{m}@{level}={us:.2f}" for (m, level), us in times.items())
            print(f"{n}x{k} {config}: {cells} merit {figure:.3f}", flush=True)
        best[n, k] = rows[merit.index(min(merit))][0]
        del weights
        torch.cuda.empty_cache()
    if args.write:
        name = tuning.gpu_key(torch.cuda.get_device_properties(0).name)
        path = Path(__file__).resolve().parent.parent / "configs" / "tuning" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tuning.dump(name, tuning.tuned(name) | best, {"torch": torch.__version__}, tuning.tuned_prefill(name)))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
