"""A whole vLLM engine, one GPU: time per output token, time to first token, memory; tilequant beside bf16, W4A16 and W8A8-INT8.

    python benchmarks/bench_e2e.py --folder SCRATCH [--methods tilequant bf16 w4a16 w8a8] [--batch 1 8 16 32 64]
    python benchmarks/bench_e2e.py --folder SCRATCH --tiny --methods tilequant bf16     # anywhere, to try it

Weights are random (`synthetic.py`), all settings equal, CUDA graphs on where the device has them, captured for the batches
measured and, as vLLM itself would, for a prompt of up to twice `max_num_seqs`. One engine serves every profile and batch of a
method. Times are medians, of answers of one token over nine requests at least. The thresholds of a profile are scaled until the
loaded bits, counted in the same engine from the activations of decode steps outside of graphs, meet its name; `loaded_bits` of
a batch is what its rows want together, and empty where they run at stored precision. `--overlap` sets an option of Inductor's,
`triton.enable_pdl`, for every method (docs/performance.md). `weights_s` is what vLLM says it took to load and prepare the
weights; with `--stored` bf16 has some to load too (else they are made up), freshly written as ours are. A method that cannot
run is named at the end, never estimated. Writes `benchmarks/results/e2e.<device>.json`, or `e2e_overlap.<device>.json`. Runs in
the serving environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import report
import synthetic
import torch
from engine_run import SETTINGS, engine_run, loaded_bits
from legal_sizes import Shape
from trace_rows import kernels, store, without

from vllm_tilequant import ops
from vllm_tilequant.kernels.dispatch import GRADED_ROWS
from vllm_tilequant.schema import LEVELS, QUANT_METHOD

BIG = (Shape("8B shape", 4096, 14336, 32, 8, 128), 32, 128256)
TINY = (Shape("tiny", 256, 512, 4, 2, 64), 2, 512)
#: Prompts of the row for the first token, and of those for the others.
LONG, PROMPT, OUTPUT = 6000, 128, 256
NEAR_BITS = 0.1
#: Of answers of one token, which are short: with two, one hiccup of the host is half of the result.
FIRST_REPEATS = 9
RECORDED_STEPS = 8
TRACED_STEPS, TRACED_BATCHES = 32, (1, 8, 64)
#: 64 requests of the other rows take 3 GiB at the 8B shape.
KV_BYTES = 8 * 2**30
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}
#: `tilequant-int8` is the checkpoint of `tilequant` with an INT8 copy of the weights in memory; its last profile only.
METHODS = ("tilequant", "w4a16", "bf16", "w8a8", "tilequant-int8")
COLUMNS = {"method": "", "profile": "", "batch": "d", "prompt": "d", "ttft_ms": ".1f", "tpot_ms": ".3f", "loaded_bits": ".2f"}
COLUMNS |= {"resident_bits": ".2f", "resident_gib": ".2f", "peak_gib": ".2f", "load_s": ".0f", "weights_s": ".1f"}


class Probe:
    """Becomes part of vLLM's worker."""

    def tile_layers(self) -> list[Any]:
        return [m for m in self.get_model().modules() if hasattr(m, "active_thresholds")]  # type: ignore[attr-defined]

    def use_profile(self, profile: str, factor: float) -> None:
        for layer in self.tile_layers():
            layer.quant_method.set_profile(layer, profile)
            layer.active_thresholds.mul_(factor)

    def record(self, rows: int) -> None:
        """From now on keep, per call of a linear with so many rows, the largest |x| of every channel among them.

        A replayed graph runs no Python, so that vLLM's choice of graphs is told that there are none, until `stop`. The model
        stays compiled, and the products are the same.
        """
        self.recorded: dict[int, list[torch.Tensor]] = {}
        self.product = ops.dispatch

        def product(x: torch.Tensor, w: Any, bias: Any, thresholds: torch.Tensor, **options: Any) -> torch.Tensor:
            flat = x.reshape(-1, x.shape[-1])
            if flat.shape[0] == rows:
                self.recorded.setdefault(thresholds.data_ptr(), []).append(flat.float().abs().amax(0).cpu())
            return self.product(x, w, bias, thresholds, **options)

        ops.dispatch = product
        self.replay(False)

    def counted(self, factors: list[float]) -> list[float]:
        """Loaded bits of what was recorded, were the thresholds multiplied by each of `factors`."""
        layers = self.tile_layers()
        if silent := sum(layer.active_thresholds.data_ptr() not in self.recorded for layer in layers):
            raise RuntimeError(f"{silent} of {len(layers)} linears were never called with these rows outside of a graph")
        found = []
        for factor in factors:
            levels = [0.0] * len(LEVELS)
            for layer in layers:
                outputs = sum(member.module.out_features for member in layer.quant_method.members)
                size = torch.cat(self.recorded[layer.active_thresholds.data_ptr()])
                level = torch.bucketize(size, layer.active_thresholds.cpu() * factor)
                for i, n in enumerate(torch.bincount(level, minlength=len(LEVELS)).tolist()):
                    levels[i] += n * outputs
            found.append(loaded_bits(levels))
        return found

    def stop_recording(self) -> None:
        ops.dispatch = self.product
        self.recorded.clear()
        self.replay(True)

    def replay(self, on: bool) -> None:
        """Whether captured graphs are used; the flags that vLLM's two model runners ask."""
        for holder, flag in (("cudagraph_manager", "_graphs_captured"), ("cudagraph_dispatcher", "keys_initialized")):
            if hasattr(found := getattr(self.model_runner, holder, None), flag):  # type: ignore[attr-defined]
                setattr(found, flag, on)

    def start_trace(self) -> None:
        self.trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.trace.start()

    def stop_trace(self) -> list[dict[str, Any]]:
        torch.cuda.synchronize()
        self.trace.stop()
        return kernels(self.trace, 1)

    def sizes(self) -> dict[str, float]:
        """Bytes of all parameters and buffers, of those of decoder linears, and the most that was allocated."""
        model = self.get_model()  # type: ignore[attr-defined]

        def total(modules: Any) -> int:
            stores = (t.untyped_storage() for m in modules for t in (*m.parameters(), *m.buffers()))
            return sum({s.data_ptr(): s.nbytes() for s in stores}.values())

        linears = [m for n, m in model.named_modules() if hasattr(m, "quant_method") and ".layers." in n and "_proj" in n]
        return {
            "resident": total([model]),
            "linears": total(linears),
            "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }


def run_engine(options: dict[str, Any], output: Path) -> None:
    """One engine in this process; what to measure comes in `options`, what was measured goes to `output`."""
    from vllm import LLM, SamplingParams

    work, vocab, turn = options.pop("work"), options.pop("vocab"), options.pop("turn", None)
    start = time.monotonic()
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, seed=0, worker_extension_cls="bench_e2e.Probe", **options)
    load_s = time.monotonic() - start
    if turn is not None:
        wait_for_turn(Path(turn))
    g = torch.Generator().manual_seed(0)

    def seconds(batch: int, prompt: int, tokens: int, repeats: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": torch.randint(3, vocab, (prompt,), generator=g).tolist()} for _ in range(batch)]
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            times.append(time.perf_counter() - began)
        return median(times)

    def count(batch: int, factors: list[float]) -> float:
        """Loaded bits of decode steps of `batch` requests; with `factors` [low, high], first search the one for the profile."""
        llm.collective_rpc("record", args=(batch,))
        seconds(batch, work["prompt"], RECORDED_STEPS + 1, 1)
        while factors[1] / factors[0] > 1.001:  # loaded bits fall as the factor rises
            middle = (factors[0] * factors[1]) ** 0.5
            bits = llm.collective_rpc("counted", args=([middle],))[0][0]
            factors[0 if bits > float(profile) else 1] = middle
        bits = llm.collective_rpc("counted", args=([1.0],))[0][0]
        llm.collective_rpc("stop_recording")
        return bits

    def traced(batch: int, prompt: int, tokens: int) -> list[dict[str, Any]]:
        llm.collective_rpc("start_trace")
        seconds(batch, prompt, tokens, 1)
        return llm.collective_rpc("stop_trace")[0]

    rows: list[dict[str, Any]] = []
    for profile in work["profiles"]:
        bits, factor = {}, 1.0
        if profile is not None:
            for _ in range(2):  # other thresholds give other activations
                llm.collective_rpc("use_profile", args=(profile, factor))
                count(1, found := [0.25, 4.0])
                factor *= found[1]
            llm.collective_rpc("use_profile", args=(profile, factor))
            bits = {batch: count(batch, [1.0, 1.0]) for batch in work["batch"] if batch <= GRADED_ROWS}
            bits[1] = bits.get(1) or count(1, [1.0, 1.0])
        common = {"profile": profile, "prompt": work["prompt"], "output": work["output"]}
        for batch in work["batch"]:
            seconds(batch, work["prompt"], 2, 1)  # warms up
            first = seconds(batch, work["prompt"], 1, max(FIRST_REPEATS, work["repeats"]))
            whole = seconds(batch, work["prompt"], work["output"] + 1, work["repeats"])
            row = common | {"batch": batch, "ttft_ms": 1e3 * first, "tpot_ms": 1e3 * (whole - first) / work["output"]}
            rows.append(row | {"loaded_bits": bits.get(batch), "one_row_bits": bits.get(1), "threshold_factor": factor})
    if work["long"]:
        seconds(1, work["long"], 1, 1)
        first = seconds(1, work["long"], 1, max(FIRST_REPEATS, work["repeats"]))
        row = {"profile": profile, "batch": 1, "prompt": work["long"], "output": 1}
        rows.append(row | {"ttft_ms": 1e3 * first, "tpot_ms": None, "loaded_bits": None, "one_row_bits": bits.get(1)})
    got = {"rows": rows, "load_s": load_s, "sizes": llm.collective_rpc("sizes")[0], "traces": []}
    output.write_text(json.dumps(got))  # whatever becomes of the traces
    for batch in work["trace"]:  # what a trace of the prompt alone has is taken off
        before, whole = (traced(batch, work["prompt"], 1 + steps) for steps in (0, TRACED_STEPS))
        case = {"phase": "decode", "batch": batch, "prompt": work["prompt"]}
        got["traces"].append(case | {"steps": TRACED_STEPS, "rows": without(whole, before, TRACED_STEPS)})
    if work["trace"] and work["long"]:
        case = {"phase": "prompt", "batch": 1, "prompt": work["long"], "steps": 1}
        got["traces"].append(case | {"rows": traced(1, work["long"], 1)})
    output.write_text(json.dumps(got))


def wait_for_turn(turn: Path) -> None:
    """Say that this engine has started, and wait until it is its turn; not longer than the process that asked for it lives."""
    parent = os.getppid()
    turn.with_suffix(".started").touch()
    while not turn.with_suffix(".go").exists():
        if os.getppid() != parent:
            sys.exit("whoever asked for this engine is gone")
        time.sleep(0.1)


def folder_of(args: argparse.Namespace, method: str) -> Path:
    return args.folder / ("tilequant" if method == "tilequant-int8" else method)


def captured(batches: list[int], prompt: int) -> list[int]:
    """Rows of the graphs that are replayed: of steps of these batches, and of a prompt alone where vLLM's sizes reach it."""
    prompts = {prompt} if prompt <= 2 * SETTINGS["max_num_seqs"] else set()
    return sorted({*batches, SETTINGS["max_num_seqs"]} | prompts)


def stores(args: argparse.Namespace, method: str) -> bool:
    """Whether a method has weights to load, rather than made up ones."""
    return method.startswith("tilequant") or (method == "bf16" and args.stored)


def write_model(args: argparse.Namespace, method: str, device: str, model: tuple[Shape, int, int]) -> None:
    """The method's folder, unless it is there."""
    folder = folder_of(args, method)
    if folder.exists():
        return
    if not stores(args, method):
        synthetic.write_config(folder, *model, {"bf16": None, "w4a16": synthetic.W4A16, "w8a8": W8A8}[method])
    elif method == "bf16":
        synthetic.write_dense(folder, *model, device)
    else:
        synthetic.write_tilequant(folder, *model, args.prompt + args.output_tokens // 2, device)
    if device == "cuda":
        torch.cuda.empty_cache()


def measure(
    args: argparse.Namespace,
    method: str,
    device: str,
    model: tuple[Shape, int, int],
    tp: int = 1,
    turn: Path | None = None,
    **engine: Any,
) -> list[dict[str, Any]]:
    """Rows of one method. args: those of `add_load`; model: shape, layers, vocabulary; engine: more of vLLM's settings

    turn: for `wait_for_turn`, where other engines start at the same time
    """
    shape, layers, vocab = model
    copy = method == "tilequant-int8"
    write_model(args, method, device, model)
    folder = folder_of(args, method)
    work: dict[str, Any] = {"batch": args.batch, "repeats": args.repeats, "profiles": [None]}
    work |= {"long": args.long, "prompt": args.prompt, "output": args.output_tokens}
    work["trace"] = (
        [b for b in TRACED_BATCHES if b in args.batch] if args.trace and device == "cuda" and method in args.traced else []
    )
    options: dict[str, Any] = {"model": str(folder), "dtype": "bfloat16", "vocab": vocab, "work": work}
    options |= {"max_model_len": max(args.long or 0, args.prompt + args.output_tokens) + 64, **SETTINGS, **engine}
    options |= {"tensor_parallel_size": tp}
    # No graph that nothing here replays, and the same room for keys and values for all: a start is most of a method's time.
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": captured(args.batch, args.prompt)}
    if args.overlap:
        compilation["inductor_compile_config"] = {"triton.enable_pdl": True}
    graphs = {"compilation_config": compilation}
    room = {"kv_cache_memory_bytes": KV_BYTES, "gpu_memory_utilization": 0.6 if turn is None else 0.2}
    options |= {"enforce_eager": True} if device == "cpu" else graphs | room
    options["load_format"] = "auto" if stores(args, method) else "dummy"
    if method.startswith("tilequant"):
        work["profiles"] = args.profile[-1:] if copy else args.profile
        options["additional_config"] = {QUANT_METHOD: {"profile": work["profiles"][0], "int8_copy": copy}}
    if turn is not None:
        options["turn"] = str(turn)
    began = time.monotonic()
    got = engine_run(args, name := f"{method}-tp{tp}", __file__, **options)
    said = re.search(r"Model loading took .*?([\d.]+) seconds", (args.folder / f"{name}.log").read_text(errors="replace"))
    print(f"{method}: {got['load_s']:.0f} s to start, {time.monotonic() - began:.0f} s in all", flush=True)
    for trace in got["traces"]:
        row = next(r for r in reversed(got["rows"]) if r["batch"] == trace["batch"] and r["prompt"] == trace["prompt"])
        case = {"model": method, "profile": row["profile"]} | {k: trace[k] for k in ("phase", "batch", "prompt")}
        step_us = 1e3 * (row["tpot_ms"] or row["ttft_ms"])
        store(args.trace, device, case, trace["rows"], step_us, steps=trace["steps"])
    sizes, weights = got["sizes"], layers * sum(n * k for n, k in shape.linears().values())
    common = {
        "resident_gib": sizes["resident"] / 2**30, "peak_gib": sizes["peak"] / 2**30 or None,
        "resident_bits": 8 * tp * sizes["linears"] / weights or None, "tp": tp, "pp": 1,
        "load_s": got["load_s"] if turn is None else None,
        "weights_s": float(said[1]) if said and turn is None and stores(args, method) else None,
        "stored_gib": sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 2**30 or None,
        "repeats": args.repeats, "overlap": args.overlap, **SETTINGS,
    }  # fmt: skip
    return [{"model": shape.name, "method": method} | row | common for row in got["rows"]]


Results = Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]


def one_by_one(args: argparse.Namespace, device: str, model: tuple[Shape, int, int]) -> Results:
    """Methods, and what gives their rows."""
    for method in args.methods:
        yield method, partial(measure, args, method, device, model)


def together(args: argparse.Namespace, device: str, model: tuple[Shape, int, int]) -> Results:
    """The same with all engines started at once: most of a start is compiling. Nobody measures before all have started."""
    turns = {method: args.folder / f"{method}.turn" for method in args.methods}
    for method, turn in turns.items():
        for suffix in (".started", ".go"):
            turn.with_suffix(suffix).unlink(missing_ok=True)
        write_model(args, method, device, model)
    with ThreadPoolExecutor(len(turns)) as pool:
        rows = {method: pool.submit(measure, args, method, device, model, turn=turn) for method, turn in turns.items()}
        while not all(rows[method].done() or turn.with_suffix(".started").exists() for method, turn in turns.items()):
            time.sleep(0.1)
        for method, turn in turns.items():
            turn.with_suffix(".go").touch()
            wait([rows[method]])
            yield method, rows[method].result


def add_load(parser: argparse.ArgumentParser, batch: list[int], long: int | None) -> None:
    """Arguments that say what `measure` asks of an engine; long: None for no such row."""
    parser.add_argument("--profile", nargs="+", default=list(synthetic.PROFILES), choices=synthetic.PROFILES)
    parser.add_argument("--batch", type=int, nargs="+", default=batch)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT)
    parser.add_argument("--long", type=int, default=long, help="prompt of the row for the first token")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stored", action="store_true", help="write weights for bf16 too, and load them")
    parser.add_argument("--overlap", action="store_true", help="let Inductor launch its kernels before their predecessors end")
    parser.add_argument("--trace", type=Path, help="file for what every kernel takes of a step, as profile_step.py writes it")
    parser.add_argument(
        "--traced", nargs="+", default=list(METHODS), choices=METHODS, help="methods to trace; it takes a while"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="for models (some 10 GB; those found are used) and logs")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--together", action="store_true", help="start all engines at once; says nothing of load times")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/e2e.<device>.json")
    add_load(parser, batch=[1, 8, 16, 32, 64], long=LONG)
    args = parser.parse_args()
    if args.engine:
        run_engine(json.loads(args.engine), args.output)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stem = "e2e_overlap" if args.overlap else "e2e"
    path, rows, missing = args.json or report.default_path(stem, device), [], {}
    args.folder.mkdir(parents=True, exist_ok=True)
    for method, measured in (together if args.together else one_by_one)(args, device, TINY if args.tiny else BIG):
        try:
            found = measured()
        except (OSError, ValueError) as e:  # the other methods are still worth their time
            missing[method] = str(e)
            continue
        far = {
            r["profile"]: r["one_row_bits"]
            for r in found
            if abs((r["one_row_bits"] or 0) - float(r["profile"] or 0)) > NEAR_BITS
        }
        missing |= {f"profile {p}": f"{bits:.2f} bits are loaded, not within {NEAR_BITS} of it" for p, bits in far.items()}
        found = [row for row in found if row["profile"] not in far]
        rows += found
        report.write(path, report.envelope(stem, device, rows))
        print(report.table(found, COLUMNS), flush=True)
    for method, why in missing.items():
        print(f"not measured: {method}: {why}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
