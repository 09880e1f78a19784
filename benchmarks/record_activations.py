"""Record the inputs of a linear while its model reads text, and its thresholds, for `bench_decode_bitplane.py --recorded`.

    python benchmarks/record_activations.py CHECKPOINT OUT.safetensors [--text FILE] [--module NAME] [--profile 3.0]

The inputs of one module at neighbouring positions are laid side by side until a row is as wide as the benchmark's shape: its
levels are those of real activations under the module's own thresholds, with whatever structure they have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.hf import load_reference

ROWS = 8
#: Positions before the first recorded one, so that it has a context.
SKIP = 64


def record(folder: Path, text: str, module: str, profile: str, width: int) -> dict[str, torch.Tensor]:
    """rows: [8, width] bfloat16; thresholds: [4] float32."""
    model = load_reference(folder, profile=profile, graded="always")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    layer = model.get_submodule(module)
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    k = Checkpoint.open(folder).schema.modules[module].in_features
    positions = -(-width // k) * ROWS
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : SKIP + positions]
    if ids.shape[1] < SKIP + positions:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, wanted {SKIP + positions}: give a longer one")
    with torch.inference_mode():
        model(ids)
    handle.remove()
    rows = seen[0].reshape(-1, k)[SKIP:].reshape(ROWS, -1)[:, :width]
    stored = Checkpoint.open(folder)
    thresholds = stored.module(module).thresholds[stored.schema.profile_row(profile)]
    return {"rows": rows.to(torch.bfloat16).contiguous(), "thresholds": thresholds.float().contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parent.parent / "configs/calibration/heldout.txt")
    parser.add_argument("--module", default="model.layers.15.mlp.gate_proj")
    parser.add_argument("--profile", default="3.0")
    parser.add_argument("--width", type=int, default=4096)
    args = parser.parse_args()
    tensors = record(args.checkpoint, args.text.read_text(), args.module, args.profile, args.width)
    levels = (tensors["rows"].float().abs()[..., None] > tensors["thresholds"]).sum(-1)
    shares = [f"{float((levels == i).float().mean()):.0%}" for i in range(5)]
    save_file(tensors, args.out, {"module": args.module, "profile": args.profile, "width": str(args.width)})
    print(f"{args.module} at {args.profile}: shares of 0/2/4/6/8 bits {' '.join(shares)}; wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
