"""Where the time of one decode step, or of one prompt, goes: kernels of a whole engine by torch's profiler, and the rest.

    python benchmarks/profile_step.py FOLDER --profile 3.0 --factor 1.02 --batch 1      # a checkpoint that bench_e2e.py wrote
    python benchmarks/profile_step.py FOLDER --dummy --batch 8                          # any model folder, weights made up
    python benchmarks/profile_step.py FOLDER --phase decode prompt --long 6000          # both, with one engine

The engine runs in this process, with the settings of `bench_e2e.py`. Steps are timed first without the profiler; then as many
are profiled. A row is a kernel with one grid: launches and microseconds of a step, and its share of the step. `(no kernel)` is
what remains of a step when what kernels cover together is taken off; kernels may overlap (a launch that starts before its
predecessor has ended), so that the rows can add up to more. An engine in a process of its own overlaps more of the host's work:
`--step-us` takes the step's time from a row of `bench_e2e.py` (`tpot_ms`), as `--factor` takes the factor of the profile's
thresholds (`threshold_factor`). Where there is no GPU the rows are operators of the CPU by their own time, under the profiler.
Writes `benchmarks/results/profile_step.<device>.json`, replacing only rows of the same case. Runs in the serving environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from bench_e2e import KV_BYTES, LONG, PROMPT, SETTINGS
from engine_run import environment
from trace_rows import CASE, kernels, short, store

from vllm_tilequant.schema import QUANT_METHOD

COLUMNS = {"kernel": "", "grid": "", "calls": ".1f", "us": ".1f", "share": ".1%"}
WARM_STEPS = 8


class Engine:
    """vLLM in this process, one step at a time."""

    def __init__(self, args: argparse.Namespace, on_gpu: bool) -> None:
        from vllm import LLM

        self.vocab = json.loads((args.folder / "config.json").read_text())["vocab_size"]
        chosen = {} if args.profile is None else {"additional_config": {QUANT_METHOD: {"profile": args.profile}}}
        steps = WARM_STEPS + 2 * args.steps + 32
        graphs = {"compilation_config": {"cudagraph_capture_sizes": [args.batch]}}
        room = graphs | {"kv_cache_memory_bytes": KV_BYTES, "gpu_memory_utilization": 0.6}
        self.llm = LLM(
            model=str(args.folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            seed=0,
            max_model_len=max(args.prompt + steps, args.long) + 64,
            load_format="dummy" if args.dummy else "auto",
            worker_extension_cls="bench_e2e.Probe",
            **(room if on_gpu else {"enforce_eager": True}),
            **(SETTINGS | {"max_num_seqs": max(args.batch, SETTINGS["max_num_seqs"])}),
            **chosen,
        )
        if args.profile is not None:
            self.llm.collective_rpc("use_profile", args=(args.profile, args.factor))
        self.asked = 0

    def ask(self, batch: int, prompt: int, tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        g = torch.Generator().manual_seed(self.asked)
        for _ in range(batch):
            ids = torch.randint(3, self.vocab, (prompt,), generator=g).tolist()
            self.llm.llm_engine.add_request(str(self.asked), {"prompt_token_ids": ids}, sampling)
            self.asked += 1

    def step(self) -> list[int]:
        """One step of the engine; how many tokens each request has."""
        return [len(o.outputs[0].token_ids) for o in self.llm.llm_engine.step()]

    def run_out(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()


def synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def measure(
    engine: Engine, phase: str, batch: int, prompt: int, count: int, on_gpu: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Microseconds of a step without the profiler, and the rows of the steps with it. count: of steps, each time"""

    def prompts() -> None:
        for _ in range(count):
            engine.ask(batch, prompt, 1)
            engine.run_out()

    def steps() -> None:
        for _ in range(count):
            engine.step()

    run = prompts if phase == "prompt" else steps
    if phase == "prompt":
        prompts()  # warms up
    else:
        engine.ask(batch, prompt, WARM_STEPS + 2 * count + 32)
        slowest = 0
        while slowest < WARM_STEPS:  # every request has had its prompt
            got = engine.step()
            slowest = min(got) if len(got) == batch else 0
    synchronize(on_gpu)
    began = time.perf_counter()
    run()
    synchronize(on_gpu)
    step_us = 1e6 * (time.perf_counter() - began) / count
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
        run()
        synchronize(on_gpu)
    rows = kernels(profiler, count) if on_gpu else operators(profiler, count)
    engine.run_out()
    return step_us, rows


def operators(profiler: Any, steps: int) -> list[dict[str, Any]]:
    """Rows of a CPU's operators by the time spent in none of those that they call, and their sum."""
    rows = [
        {"kernel": short(e.key), "grid": "", "calls": e.count / steps, "us": e.self_cpu_time_total / steps, "full_name": e.key}
        for e in profiler.key_averages()
    ]
    rows.sort(key=lambda r: -r["us"])
    return [*rows, {"kernel": "(any kernel)", "grid": "", "calls": None, "us": sum(r["us"] for r in rows)}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--phase", nargs="+", choices=("decode", "prompt"), default=["decode"])
    parser.add_argument("--batch", type=int, default=1, help="requests of a decode step")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens that they have before")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the one prompt of that phase")
    parser.add_argument("--steps", type=int, default=32, help="timed, and then profiled; an eighth of them are prompts")
    parser.add_argument("--profile", help="of a tilequant checkpoint; its default if left out")
    parser.add_argument("--factor", type=float, default=1.0, help="of the profile's thresholds")
    parser.add_argument("--step-us", type=float, help="the time to account for, instead of the one measured here")
    parser.add_argument("--dummy", action="store_true", help="--load-format dummy")
    parser.add_argument("--rows", type=int, default=25, help="rows of the printed table; the JSON has all")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/profile_step.<device>.json")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} holds no config.json")
    if args.factor != 1.0 and args.profile is None:
        parser.error("--factor needs --profile")
    os.environ.update(environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})  # before vLLM is imported
    on_gpu = torch.cuda.is_available()
    engine = Engine(args, on_gpu)
    for phase in args.phase:
        account(engine, args, phase, on_gpu)
    return 0


def account(engine: Engine, args: argparse.Namespace, phase: str, on_gpu: bool) -> None:
    """Measure one phase, write its rows in the place of those of the same case, and print the longest."""
    batch, prompt, count = (
        (args.batch, args.prompt, args.steps) if phase == "decode" else (1, args.long, max(1, args.steps // 8))
    )
    step_us, rows = measure(engine, phase, batch, prompt, count, on_gpu)
    print(f"{phase}: {step_us:.1f} us a step in this process without the profiler, {count} steps")
    if phase == "decode":
        step_us = args.step_us or step_us
    case = dict(zip(CASE, (args.folder.name, phase, batch, prompt, args.profile), strict=True))
    device = "cuda" if on_gpu else "cpu"
    path = args.json or report.default_path("profile_step", device)
    rows = store(path, device, case, rows, step_us, steps=count, threshold_factor=args.factor)
    longest, others = [r for r in rows if "full_name" in r][: args.rows], [r for r in rows if "full_name" not in r]
    print(report.table([*longest, *others], COLUMNS), flush=True)


if __name__ == "__main__":
    sys.exit(main())
