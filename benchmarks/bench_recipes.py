"""Calibrate recipes and judge them in one run: the quality table from scratch.

    python benchmarks/bench_recipes.py --model SOURCE --data wiki.valid.txt --text wiki.test.txt --tokens 65536 \
        --recipe configs/recipes/default.yaml --recipe configs/recipes/w4-80.yaml

Calls the calibration that `TileQuantModifier` calls, without llm-compressor around it, so that it also runs where only torch
and transformers are (a GPU host without package index). Writes `benchmarks/results/quality.<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import report
import torch
import yaml
from bench_quality import COLUMNS, check_bars
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from vllm_tilequant import evaluate as ev
from vllm_tilequant.calibrate.checkpoint import build_schema
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.cli.evaluate import print_progress
from vllm_tilequant.kernels import layout
from vllm_tilequant.schema import QuantizationSchema


def calibrate(source: Path, out: Path, settings: Settings, windows: torch.Tensor, device: str, dtype: torch.dtype) -> dict:
    """Calibrate `source` on token windows [n, length] and write a checkpoint to `out`; returns the calibration report."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    batches = [{"input_ids": w[None], "attention_mask": torch.ones_like(w[None])} for w in windows]
    result = Calibration(model, linears, batches, settings).run()
    schema = build_schema(result, linears, list(settings.profiles), settings.default_profile, ["lm_head"])
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= {n: t for n, t in load_file(file).items() if n.removesuffix(".weight") not in linears}
    for group in result.groups:
        for name in group.members:
            stored = layout.to_tensors(result.weights[name], result.thresholds[group.name].clone())
            tensors |= {f"{name}.{suffix}": t.contiguous() for suffix, t in stored.items()}
    write(source, out, tensors, schema)
    return result.report


def write(source: Path, out: Path, tensors: dict[str, torch.Tensor], schema: QuantizationSchema) -> None:
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": schema.dump()}
    (out / "config.json").write_text(json.dumps(config))
    for file in source.glob("tokenizer*"):
        (out / file.name).write_bytes(file.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder of the source model")
    parser.add_argument("--data", required=True, type=Path, help="UTF-8 text to calibrate on")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text to judge on")
    parser.add_argument("--recipe", required=True, action="append", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model while calibrating")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = ev.windows(args.model, args.data, args.samples * args.length, args.length)
    text = ev.windows(args.model, args.text, args.tokens, args.length)
    rows: list[dict] = []
    path = args.json or report.default_path("quality", args.device)
    for recipe in args.recipe:
        settings = Settings(**yaml.safe_load(recipe.read_text()))
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / recipe.stem
            made = calibrate(args.model, out, settings, data, args.device, getattr(torch, args.dtype))
            schema = ev.Checkpoint.open(out).schema
            wanted = [
                *ev.configurations(schema, schema.profiles.names, ["none", "group64"], ["static"]),
                *ev.configurations(schema, [*schema.profiles.names, "full"], ["group64"], ["graded"]),
            ]
            found = ev.evaluate(out, args.model, text, wanted, device=args.device, name=recipe.stem, progress=print_progress)
        seconds = made["seconds"]
        rows += [row | {"recipe": recipe.stem, "model": args.model.name, "calibration_seconds": seconds} for row in found]
        report.write(path, report.envelope("quality", args.device, rows))  # after every recipe: a killed run keeps its rows
        print(f"{recipe.stem}: calibrated in {sum(seconds.values()):.1f} s ({seconds})")
    print(report.table(rows, {"recipe": ""} | COLUMNS))
    first = rows[0]
    print(f"{first['tokens']} tokens, {first['dtype']}; reference perplexity {first['ppl_reference']:.4f}; rows in {path}")
    for passed, sentence in check_bars([r for r in rows if r["recipe"] == args.recipe[0].stem]):
        print("PASS" if passed else "FAIL", sentence)


if __name__ == "__main__":
    main()
