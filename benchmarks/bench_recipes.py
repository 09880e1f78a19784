"""Calibrate recipes and judge them in one run: the quality table from scratch (`make quality`).

    python benchmarks/bench_recipes.py --model SOURCE --data wiki.valid.txt --text wiki.test.txt --also gsm8k.jsonl \
        --recipe configs/recipes/default.yaml --recipe configs/recipes/w4-80.yaml

Calls the calibration that `TileQuantModifier` calls, without llm-compressor around it, so that it also runs where only torch
and transformers are (a GPU host without package index). Writes `benchmarks/results/quality.<device>.json`, prints the table
and the bars of each recipe (`BARS`); exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
import torch
import yaml
from bench_quality import COLUMNS
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from vllm_tilequant import evaluate as ev
from vllm_tilequant.calibrate.checkpoint import build_schema, untie_head
from vllm_tilequant.calibrate.pipeline import Calibration
from vllm_tilequant.calibrate.settings import Settings
from vllm_tilequant.cli.evaluate import print_progress
from vllm_tilequant.hf import STATIC_ACTIVATIONS
from vllm_tilequant.schema import PROFILE_FULL, PROFILE_OFF, QuantizationSchema

#: Recipe -> most stored bits, and (profile, most loaded bits, most KL in milli-nats) for 65,536 tokens of WikiText-2 test with
#: the sample model. `off` is static with bf16 activations, the others are graded with INT8 activations.
BARS: dict[str, tuple[float, list[tuple[str, float | None, float]]]] = {
    "w8": (8.04, [("off", None, 4)]),
    "default": (5.64, [("off", None, 36), ("4.0", 4.06, 52), ("3.0", 3.06, 103), ("2.5", 2.56, 186)]),
    "w4-80": (4.84, [("off", None, 53), ("4.0", 4.06, 64), ("3.0", 3.06, 106), ("2.5", 2.56, 178)]),
    "w4": (4.04, [("off", None, 90)]),
    "w8-graded": (8.04, [("4.0", 4.06, 38), ("3.0", 3.06, 115), ("2.5", 2.56, 215)]),
}
#: Most KL in milli-nats that the long prefill's arithmetic adds to the stored weights: where inputs are rotated, and elsewhere.
PREFILL_ADDS = {True: 4.0, False: 7.0}


def calibrate(source: Path, out: Path, settings: Settings, windows: torch.Tensor, device: str, dtype: torch.dtype) -> dict:
    """Calibrate `source` on token windows [n, length] and write a checkpoint to `out`; returns the calibration report."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    ignore = ["lm_head"] if settings.lm_head == "off" else []
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in ignore}
    untie_head(model, linears)
    batches = [{"input_ids": w[None], "attention_mask": torch.ones_like(w[None])} for w in windows]
    result = Calibration(model, linears, batches, settings).run()
    schema = build_schema(result, linears, list(settings.profiles), settings.default_profile, ignore)
    tensors, state = {}, model.state_dict()  # of the model: a folded input diagonal has changed norms
    for file in sorted(source.glob("*.safetensors")):
        dense = {n: t for n, t in load_file(file).items() if n.removesuffix(".weight") not in linears}
        tensors |= {n: state[n].to("cpu", t.dtype) for n, t in dense.items()}
    for name in result.weights:
        tensors |= {f"{name}.{suffix}": t.clone() for suffix, t in result.tensors(name).items()}
    write(source, out, tensors, schema)
    return result.report


def write(source: Path, out: Path, tensors: dict[str, torch.Tensor], schema: QuantizationSchema) -> None:
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": schema.dump()}
    if "lm_head" in schema.modules:
        config["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config))
    for file in source.glob("tokenizer*"):
        (out / file.name).write_bytes(file.read_bytes())


def plain_text(path: Path, scratch: Path) -> Path:
    """A text file as it is; of a JSONL file with questions and answers, their text."""
    if path.suffix != ".jsonl":
        return path
    out = scratch / f"{path.stem}.txt"
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    out.write_text("\n\n".join(f"{r['question']}\n{r['answer']}" for r in records))
    return out


def check_bars(rows: list[dict[str, Any]], recipe: str, rotated: bool = False) -> list[tuple[bool, str]]:
    """(passed, sentence) of every bar of a recipe; rows: those of its main text; rotated: whether its inputs are."""
    if recipe not in BARS:
        return []
    most_stored, bars = BARS[recipe]
    stored = rows[0]["stored_bits"]
    out = [(stored <= most_stored, f"{recipe}: stored bits {stored:.3f} <= {most_stored}")]
    for profile, most_loaded, most_kl in bars:
        phase, activation = ("static", "none") if profile == PROFILE_OFF else ("graded", "group64")
        row = next(r for r in rows if (r["profile"], r["phase"], r["activation"]) == (profile, phase, activation))
        kl, loaded = row["kl_milli"], row["loaded_bits"]
        passed = kl <= most_kl and (most_loaded is None or loaded <= most_loaded)
        bits = "" if most_loaded is None else f", {loaded:.3f} <= {most_loaded} loaded bits"
        out.append((passed, f"{recipe}, {phase} {profile}: KL {kl:.1f} <= {most_kl:g} milli-nats{bits}"))
    row = next(r for r in rows if r["activation"] == "token_smooth")
    added, most = row["kl_over_static"], PREFILL_ADDS[rotated]
    out.append((added <= most, f"{recipe}, long prompts: {added:.1f} <= {most:g} milli-nats more than static"))
    return out


def judge(out: Path, source: Path, text: torch.Tensor, recipe: str, device: str, graded: list[str] | None = None) -> list[dict]:
    """Static rows with each arithmetic of activations, and graded ones for every profile (or those named)."""
    schema = ev.Checkpoint.open(out).schema
    graded = [*schema.profiles.names, PROFILE_FULL] if graded is None else [p for p in graded if p != PROFILE_OFF]
    wanted = ev.configurations(schema, [], STATIC_ACTIVATIONS, ["static"])
    wanted += ev.configurations(schema, graded, ["group64"], ["graded"]) if graded else []
    return ev.evaluate(out, source, text, wanted, device=device, name=recipe, progress=print_progress)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder of the source model")
    parser.add_argument("--data", required=True, type=Path, help="UTF-8 text to calibrate on")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text to judge on")
    parser.add_argument("--also", type=Path, help="another text, or JSONL with question and answer, judged beside it")
    parser.add_argument("--recipe", required=True, action="append", type=Path)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--also-tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model while calibrating")
    parser.add_argument("--stem", default="quality", help="of the results' file")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = ev.windows(args.model, args.data, args.samples * args.length, args.length)
    rows: list[dict] = []
    verdicts: list[tuple[bool, str]] = []
    path = args.json or report.default_path(args.stem, args.device)
    with tempfile.TemporaryDirectory() as scratch:
        text = ev.windows(args.model, args.text, args.tokens, args.length)
        also = args.also and ev.windows(args.model, plain_text(args.also, Path(scratch)), args.also_tokens, args.length)
        for recipe in args.recipe:
            settings = Settings(**yaml.safe_load(recipe.read_text()))
            out = Path(scratch) / recipe.stem
            made = calibrate(args.model, out, settings, data, args.device, getattr(torch, args.dtype))
            facts = {"recipe": recipe.stem, "model": args.model.name, "calibration_seconds": made["seconds"]}
            facts["calibration_tokens"] = int(data.numel())
            found = judge(out, args.model, text, recipe.stem, args.device)
            rows += [row | facts | {"text": args.text.stem} for row in found]
            verdicts += check_bars(found, recipe.stem, settings.input_rotation == "on")
            if also is not None:
                beside = judge(out, args.model, also, recipe.stem, args.device, [settings.default_profile])
                rows += [row | facts | {"text": args.also.parent.name or args.also.stem} for row in beside]
            report.write(path, report.envelope(args.stem, args.device, rows))  # a killed run keeps its rows
            seconds = made["seconds"]
            print(f"{recipe.stem}: calibrated in {sum(seconds.values()):.1f} s ({seconds})", flush=True)
    print(report.table(rows, {"recipe": "", "text": ""} | COLUMNS))
    print(f"{text.numel()} tokens; reference perplexity {rows[0]['ppl_reference']:.4f}; rows in {path}")
    for passed, sentence in verdicts:
        print("PASS" if passed else "FAIL", sentence)
    return 0 if all(passed for passed, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
