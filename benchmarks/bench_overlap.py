"""A decoder layer of the 8B shape without its attention, captured: Inductor's launches as they are, and programmatic.

    python benchmarks/bench_overlap.py [--rows 1 4 8] [--json FILE]

Norms, SiLU and the rest that Inductor compiles stand between the four graded linears (profile 3.0), in the order of a Llama.
With `triton.enable_pdl` a kernel of Inductor's may start before the linear in front of it has ended, and lets the linear behind
it start before it has: the outputs must be the same bits. Needs a GPU of compute capability 9.0.
Writes `benchmarks/results/overlap.<device>.json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
import shapes
import timing
import torch
from torch import Tensor

from vllm_tilequant.kernels import decode_bitplane

HIDDEN, INNER = 4096, 14336
LINEARS = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
#: So many that no cache holds the weights of one when its turn comes again.
LAYERS = 4
COLUMNS = {"M": "d", "us": ".1f", "us_programmatic": ".1f", "saved": ".1%", "same_bits": ""}


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate_up[:, :INNER]) * gate_up[:, INNER:]


def instead_of_attention(qkv: Tensor) -> Tensor:
    return qkv[:, :HIDDEN] * 0.5


class Chain:
    """LAYERS layers one after the other."""

    def __init__(self, programmatic: bool) -> None:
        torch._dynamo.reset()
        options = {"triton.enable_pdl": programmatic}
        self.norm, self.silu, self.attention = (
            torch.compile(f, dynamic=False, options=options) for f in (add_norm, silu_and_mul, instead_of_attention)
        )
        self.ones = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.thresholds = shapes.thresholds_for("3.0").cuda()

    def __call__(self, layers: list[dict[str, decode_bitplane.DecodeWeight]], x: Tensor, residual: Tensor) -> Tensor:
        def linear(rows: Tensor, weight: decode_bitplane.DecodeWeight) -> Tensor:
            return decode_bitplane.decode_linear(rows, weight, None, self.thresholds)

        for w in layers:
            rows, residual = self.norm(x, residual, self.ones)
            x = linear(self.attention(linear(rows, w["qkv"])), w["o"])
            rows, residual = self.norm(x, residual, self.ones)
            x = linear(self.silu(linear(rows, w["gate_up"])), w["down"])
        return x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    matrices = shapes.TRANSFORMS.cuda()
    layers = [
        {name: decode_bitplane.prepare(shapes.draw_weight(*size, "cuda", seed=i), matrices) for name, size in LINEARS.items()}
        for i in range(LAYERS)
    ]
    for w in layers[0].values():
        decode_bitplane.make_ready(w, torch.bfloat16)
    us: dict[tuple[int, bool], float] = {}
    outputs: dict[tuple[int, bool], Tensor] = {}
    for programmatic in (False, True):
        chain = Chain(programmatic)
        for m in args.rows:
            x, residual = (shapes.draw_rows(m, HIDDEN, "cuda", seed=seed) for seed in (7, 8))
            us[m, programmatic] = timing.time_graph([lambda c=chain, x=x, r=residual: c(layers, x, r)], at_least=4).us / LAYERS
            outputs[m, programmatic] = chain(layers, x, residual).clone()
    rows = [
        {
            "M": m,
            "us": us[m, False],
            "us_programmatic": us[m, True],
            "saved": 1 - us[m, True] / us[m, False],
            "same_bits": torch.equal(outputs[m, False], outputs[m, True]),
        }
        for m in args.rows
    ]
    device = torch.device("cuda")
    report.write(args.json or report.default_path("overlap", device), report.envelope("overlap", device, rows))
    print(report.table(rows, COLUMNS))
    return 0 if all(row["same_bits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
