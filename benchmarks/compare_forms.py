"""How far converted folders are from the checkpoint they were made of: log-probabilities of the tokens of a text.

    tilequant convert OURS W4A16 --to w4a16 && tilequant convert OURS W8A8 --to w8a8 --requantize
    python benchmarks/compare_forms.py OURS W4A16 W8A8 --text heldout.txt --tokens 512
    VLLM_CPU_KVCACHE_SPACE=1 python benchmarks/compare_forms.py OURS W4A16 W8A8 --text heldout.txt --tokens 1024 --engine vllm

With transformers (and compressed-tensors) all are computed in float32, ours as the dense model; with vLLM in bfloat16, ours
under profile `off` without activation codes. Prints the mean log-probability of each, and the mean and largest difference to
the first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def with_transformers(folder: Path, rows: Tensor) -> Tensor:
    import vllm_tilequant.hf  # noqa: F401 - registers our quantizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = torch.cat([model(row[None]).logits.log_softmax(-1) for row in rows])
    return logprobs[:, :-1].gather(2, rows[:, 1:, None]).flatten()


def with_vllm(folder: Path, rows: Tensor) -> Tensor:
    from vllm import LLM, SamplingParams

    config = json.loads((folder / "config.json").read_text())
    ours = config.get("quantization_config", {}).get("quant_method") == "tilequant"
    extra = {"additional_config": {"tilequant": {"profile": "off", "activation": "none"}}} if ours else {}
    llm = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2 * rows.shape[1],
        max_num_seqs=4,
        enable_prefix_caching=False,
        **extra,
    )
    prompts = [{"prompt_token_ids": row} for row in rows.tolist()]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    told = [[d[t].logprob for t, d in zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:], strict=True)] for a in answers]
    return torch.tensor(told).flatten()


ENGINES = {"transformers": with_transformers, "vllm": with_vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    args = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(args.folders[0])(args.text.read_text())["input_ids"]
    if len(ids) < args.tokens or args.tokens % args.window:
        raise SystemExit(f"the text has {len(ids)} tokens; wanted {args.tokens}, a multiple of {args.window}")
    rows = torch.tensor(ids[: args.tokens]).view(-1, args.window)
    first = None
    print(f"{'folder':30} {'mean log-probability':>21} {'mean difference':>16} {'largest':>9}")
    for folder in args.folders:
        found = ENGINES[args.engine](folder, rows)
        first = found if first is None else first
        off = (found - first).abs()
        print(f"{folder.name:30} {found.mean():21.4f} {off.mean():16.4f} {off.max():9.4f}", flush=True)


if __name__ == "__main__":
    main()
