"""What INT8 activation scales that span more than a tile would cost under tensor parallelism. A simulation, in transformers.

    python benchmarks/parallel_scales.py --model SOURCE --checkpoint FOLDER --text wiki.test.txt --sizes 3

The served scales cover 64 inputs of one row and lie inside a rank's slice at every legal size. A scale over a whole row would
not: where a linear is cut along its inputs, ranks would have to agree on the row's maximum (an all-reduce before the product),
or each take the maximum of its own slice. Both are measured here on a checkpoint at stored precision, in float32, against its
source model and against each other. Writes `benchmarks/results/parallel_scales.<device>.json`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import report
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from vllm_tilequant import hf
from vllm_tilequant.checkpoint.parallel import ROW_PARALLEL, tensor_parallel
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.evaluate import compare, negative_log_likelihood, windows
from vllm_tilequant.schema import TILE

COLUMNS = {"scale": "", "tp": "d", "kl_milli": ".2f", "kl_se": ".2f", "ppl": ".3f", "kl_between": ".3f"}


def int8(x: Tensor, group: int) -> Tensor:
    """x after INT8 with one scale per row and `group` inputs, as `activation_int8_ref` rounds. [..., K] -> [..., K]."""
    v = x.float().unflatten(-1, (-1, group))
    scale = v.abs().amax(-1, keepdim=True) / 127
    scale = scale.where(scale > 0, torch.ones_like(scale))
    return ((v / scale).round().clamp(-127, 127) * scale).flatten(-2).to(x.dtype)


def quantize_inputs(
    model: nn.Module, names: list[str], group: Callable[[str, int], int]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Put `int8` before the linears `names`; group: (name, inputs) -> inputs under one scale."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        return lambda module, inputs: (int8(inputs[0], group(name, inputs[0].shape[-1])), *inputs[1:])

    return [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]


@torch.inference_mode()
def measure(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint.open(args.checkpoint)
    for size in args.sizes:
        if faults := tensor_parallel(checkpoint, size).faults:
            raise ValueError(f"tensor parallel size {size} is not legal here: {faults[0]}")
    names = list(checkpoint.schema.modules)
    variants: list[tuple[str, int | None, Callable[[str, int], int]]] = [
        ("64 inputs (served)", None, lambda name, k: TILE),
        ("whole row, maximum all-reduced", None, lambda name, k: k),
    ]
    for size in args.sizes:

        def local(name: str, k: int, size: int = size) -> int:
            return k // size if name.rpartition(".")[2] in ROW_PARALLEL else k

        variants.append(("slice of a rank", size, local))
    source = nn.Module.to(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), args.device).eval()
    model = hf.load_dense(args.checkpoint, device=args.device)
    ids = windows(args.checkpoint, args.text, args.tokens, args.window)
    kl: list[list[Tensor]] = [[] for _ in variants]
    between: list[list[Tensor]] = [[] for _ in variants]
    nll = [0.0] * len(variants)
    for part in ids.to(args.device).split(1):
        p, whole = source(part, use_cache=False).logits[0], None
        for i, (_, size, group) in enumerate(variants):
            handles = quantize_inputs(model, names, group)
            q = model(part, use_cache=False).logits
            for handle in handles:
                handle.remove()
            nll[i] += float(negative_log_likelihood(q, part))
            kl[i].append(compare(p, q[0])[0].cpu())
            if i == 1:
                whole = q[0]
            elif size is not None:
                assert whole is not None  # the whole row comes before every slice
                between[i].append(compare(whole, q[0])[0].cpu())
    rows = []
    predicted = ids.shape[0] * (ids.shape[1] - 1)
    for i, (scale, size, _) in enumerate(variants):
        values = torch.cat(kl[i])
        rows.append(
            {
                "name": checkpoint.folder.resolve().name,
                "scale": scale,
                "tp": size,
                "kl_milli": 1e3 * float(values.mean()),
                "kl_se": 1e3 * float(values.std()) / math.sqrt(values.numel()),
                "ppl": math.exp(nll[i] / predicted),
                "kl_between": 1e3 * float(torch.cat(between[i]).mean()) if between[i] else None,
                "tokens": ids.numel(),
                "window": ids.shape[1],
            }
        )
    path = args.json or report.default_path("parallel_scales", args.device)
    report.write(path, report.envelope("parallel_scales", args.device, rows))
    print(report.table(rows, COLUMNS))
    print("kl_between: from the whole row's logits to those of the slices, milli-nats; kl_milli: from the source model's")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="source model: folder or hub id")
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2], help="tensor-parallel sizes to simulate")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/parallel_scales.<device>.json")
    args = parser.parse_args()
    try:
        return measure(args)
    except (OSError, ValueError) as e:
        print(f"parallel_scales: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
