"""What calibrations cost: time by phase, memory on the GPU and on the host; of a model of 8 billion parameters, or any folder.

    python -u benchmarks/bench_calibration_cost.py --folder SCRATCH                    # on one GPU, some 15 GB in SCRATCH
    python -u benchmarks/bench_calibration_cost.py --folder SCRATCH --layers 2         # a short trial
    python -u benchmarks/bench_calibration_cost.py --folder SCRATCH --shape tiny --records 3 --length 128   # anywhere
    python -u benchmarks/bench_calibration_cost.py --folder SCRATCH --model MODEL --data TEXT --records 32 --length 512

Without MODEL, the model has a Llama's shape and random weights, made where it runs; the text is random token ids. The
calibration is the one that `TileQuantModifier` calls, without llm-compressor around it, so that it also runs where only torch
and transformers are. The default recipe; without MODEL with joint scores: loss gradients of as many prefill and decode records
as there are.

SCRATCH keeps finished steps and layers. The same command goes on with a run that was killed; times are summed over all of
them, also what a killed one had begun. Writes `benchmarks/results/calibration_cost.<device>.json`. Exit code 1 when a bar is
missed: 15 minutes in all and 40 GiB of GPU memory by the full shape, 10 minutes and 3 GiB by MODEL (meant for the sample model
on a CPU).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import report
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from vllm_tilequant import evaluate as ev
from vllm_tilequant.calibrate.checkpoint import build_schema, write_dense_back
from vllm_tilequant.calibrate.judging import Judge
from vllm_tilequant.calibrate.pipeline import STATE_TYPES, Calibration
from vllm_tilequant.calibrate.progress import Progress
from vllm_tilequant.calibrate.report import measured_bits, peak_memory, stored_bits
from vllm_tilequant.calibrate.result import Result
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.calibrate.work import WorkFolder
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.schema import QuantizationSchema

MOST_SECONDS, MOST_GPU_GIB = 900, 40
MOST_SECONDS_OF_MODEL, MOST_HOST_GIB = 600, 3
RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "default.yaml"
SHAPES: dict[str, dict[str, int]] = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
               num_hidden_layers=32, vocab_size=128256),
    "tiny": dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 num_hidden_layers=3, vocab_size=512),
}  # fmt: skip
_QUIET_S, _MOST_IMPORTS_S = 5.0, 120.0


class Told(Progress):
    """Progress as lines with the seconds of this process, and a file of what every process has taken so far."""

    def __init__(self, folder: Path, log: Path, device: torch.device):
        super().__init__(log)
        imports = time.time() - psutil.Process().create_time()  # where the system's clocks agree
        self.device, self._printed = device, 0.0
        self._start = time.perf_counter() - (imports if 0 <= imports < _MOST_IMPORTS_S else 0.0)
        self._spent = folder / f"spent.{len(list(folder.glob('spent.*.json')))}.json"

    def spend(self) -> None:
        peak: dict[str, float] = {"seconds": time.perf_counter() - self._start, "host_bytes": peak_memory()["host"]}
        if self.device.type == "cuda":
            peak["allocated_bytes"] = torch.cuda.max_memory_allocated()
            peak["reserved_bytes"] = torch.cuda.max_memory_reserved()
        scratch = self._spent.with_suffix(".new")
        scratch.write_text(json.dumps(peak))
        scratch.replace(self._spent)

    def say(self, line: str) -> None:
        self._write(line)
        self._printed = time.perf_counter()
        print(f"{self._printed - self._start:7.1f} s  {line}", flush=True)

    def _tell(self, line: str) -> None:
        self.spend()
        if time.perf_counter() - self._printed > _QUIET_S:
            self.say(line)
        else:
            self._write(line)


def random_model(shape: dict[str, int], device: torch.device) -> Any:
    """Weights are drawn on the device: on a CPU, 8 billion of them would take minutes."""
    config = LlamaConfig(**shape, max_position_embeddings=8192, rope_theta=5e5, tie_word_embeddings=False)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def random_records(n: int, length: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (n, 1, length), generator=g)
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def save(model: Any, result: Result, schema: QuantizationSchema, out: Path) -> None:
    """A checkpoint folder, one file for each decoder layer: a copy of everything at once would double the host's memory."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    quantized = {f"{n}.weight" for n in result.weights}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    files = {"dense": {n: t.cpu() for n, t in model.state_dict().items() if n not in quantized | tied}}
    places: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for name in result.weights:
        parts.setdefault(name.split(".")[2], []).append(name)
    for part in ["dense", *parts]:
        tensors = dict(files.get(part, {}))
        for name in parts.get(part, []):
            tensors |= {f"{name}.{suffix}": t.clone() for suffix, t in result.tensors(name).items()}
        save_file(tensors, out / f"model-{part}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, f"model-{part}.safetensors")
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": schema.dump()}
    (out / "config.json").write_text(json.dumps(config))


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shape: dict[str, Any] = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    recipe = yaml.safe_load(args.recipe.read_text())
    if args.model:
        shape = {"folder": args.model.name}
    else:
        recipe |= {"scores": "joint", "score_samples": args.records}
    settings = Settings(**recipe)
    args.folder.mkdir(parents=True, exist_ok=True)
    fingerprint = {"shape": shape, "recipe": settings.model_dump(mode="json"), "records": args.records, "length": args.length}
    fingerprint |= {"device": report.device_name(device) if device.type == "cuda" else "cpu", "torch": torch.__version__}
    work = WorkFolder.open(args.folder / "work", STATE_TYPES, fingerprint, resume=True)
    progress = Told(args.folder, work.log, device)
    with progress.phase("model"):
        if args.model:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
        else:
            model = random_model(shape, device)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    n = args.records + args.held_out
    if args.model:
        windows = ev.windows(args.model, args.data, n * args.length, args.length)
        records = [{"input_ids": w[None], "attention_mask": torch.ones_like(w[None])} for w in windows]
    else:
        records = random_records(n, args.length, shape["vocab_size"])
    result = Calibration(model, linears, records[: args.records], settings, progress=progress, work=work).run()
    with progress.phase("check"):
        judge = Judge(model, records[args.records :])
        measured = measured_bits(model, linears, result, progress.track(records[args.records :], "check"))
        write_dense_back(linears, result)
        quality = judge.rows(linears, result, list(settings.profiles), settings.default_profile)
    with progress.phase("save"):
        schema = build_schema(result, linears, list(settings.profiles), settings.default_profile, ["lm_head"])
        save(model, result, schema, args.folder / "checkpoint")
    progress.spend()
    if args.verify:
        progress.say(f"the checkpoint is sound: {verify(args.folder / 'checkpoint').modules} modules")
    runs = [json.loads(f.read_text()) for f in sorted(args.folder.glob("spent.*.json"))]
    peak = {f"{what}_gib": max(r[f"{what}_bytes"] for r in runs) / 2**30 for what in ("host", "allocated", "reserved")
            if f"{what}_bytes" in runs[0]}  # fmt: skip
    return {
        "model": args.model.name if args.model else f"Llama shape {args.shape}, random weights",
        **({} if args.model else shape),
        "weights": sum(m.weight.numel() for m in linears.values()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "records": args.records,
        "prefill_records": min(args.records, settings.score_samples) if settings.scores in ("joint", "prefill") else 0,
        "decode_records": min(args.records, settings.score_samples) if settings.scores in ("joint", "decode") else 0,
        "length": args.length,
        "recipe": args.recipe.stem,
        "scores": settings.scores,
        "seconds": progress.seconds,
        "total_s": sum(r["seconds"] for r in runs),
        "processes": len(runs),
        **peak,
        "stored_bits": stored_bits(result),
        "kl_milli": {row["phase"]: row["kl_milli"] for row in quality},
        "loaded_bits": {name: m["average"] for name, m in zip(settings.profiles, measured, strict=True)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="of the state, and of the checkpoint")
    parser.add_argument("--model", type=Path, help="folder of a model to take instead of random weights")
    parser.add_argument("--data", type=Path, help="UTF-8 text, for --model")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer decoder layers, for a trial")
    parser.add_argument("--records", type=int, default=24)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=2, help="more records, to measure loaded bits on")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--gpu-gib", type=float, default=MOST_GPU_GIB - 1.0, help="most that the allocator may hold")
    parser.add_argument("--verify", action="store_true", help="read the checkpoint again and judge it; not part of the time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/calibration_cost.<device>.json")
    args = parser.parse_args()
    if (args.model is None) != (args.data is None):
        parser.error("--model and --data come together")
    device = torch.device(args.device)
    if device.type == "cuda":
        limit = args.gpu_gib * 2**30 / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit))
    row = run(args, device)
    path = args.json or report.default_path("calibration_cost", device)
    report.write(path, report.envelope("calibration_cost", device, [row]))
    print(json.dumps(row, indent=1))
    print(f"{row['total_s']:.0f} s in {row['processes']} processes; row in {path}")
    if args.model:
        bars = [("total_s", MOST_SECONDS_OF_MODEL), ("host_gib", MOST_HOST_GIB)]
    else:
        bars = [("total_s", MOST_SECONDS), ("reserved_gib", MOST_GPU_GIB)] if args.shape == "8b" and not args.layers else []
    met = True
    for what, most in bars:
        if what in row:
            met &= row[what] <= most
            print("PASS" if row[what] <= most else "FAIL", f"{what} {row[what]:.2f} <= {most}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
