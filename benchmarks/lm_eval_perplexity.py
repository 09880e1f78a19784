"""The perplexity that lm-eval would print for a server, computed from the same checkpoint in transformers.

    python benchmarks/lm_eval_perplexity.py --checkpoint FOLDER --documents configs/calibration/heldout.txt --profile off

Follows lm-eval 0.4.13's `loglikelihood_rolling` through its `local-completions` model: plain tokens of each document behind one
prefix token (BOS, else EOS), cut into pieces of `max_length` - 2 that are scored once each, a later piece with as much of
the text before it as fits. Perplexities are weighted over all documents by bytes and by words split at white space.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from vllm_tilequant import hf
from vllm_tilequant.schema import ACTIVATIONS, PROFILE_OFF

#: The API model keeps one token of `max_length` for generation and one for the context of the first piece.
RESERVED = 2


def pieces(tokens: list[int], prefix: int, length: int) -> Iterator[tuple[list[int], int]]:
    """(ids, scored): the last `scored` ids of each piece are predicted, the ones before are context."""
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        ids = [prefix, *tokens[:end]] if start == 0 else tokens[max(0, end - length - 1) : end]
        yield ids, end - start


def documents(path: Path, field: str) -> list[str]:
    """The texts that the task's `doc_to_target` gives."""
    text = path.read_text(encoding="utf-8")
    return [text] if path.suffix == ".txt" else [json.loads(line)[field] for line in text.splitlines()]


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, ids: list[int], scored: int) -> float:
    """Sum of the log-probabilities of the last `scored` of `ids`, in nats."""
    row = torch.tensor([ids], device=model.device)
    logits = model(row[:, :-1], use_cache=False).logits[0, -scored:]
    return -float(F.cross_entropy(logits.float(), row[0, -scored:], reduction="none").double().sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--documents", required=True, type=Path, help="the task's data: JSON lines, or a .txt document")
    parser.add_argument("--field", default="text", help="the task's doc_to_target")
    parser.add_argument("--max-length", type=int, default=1024, help="as in --model_args of lm-eval")
    parser.add_argument("--profile", help="what the server runs with; the checkpoint's default if left out")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="group64", help="what the server runs with")
    parser.add_argument("--dense", action="store_true", help="FOLDER is an ordinary model (for the value before quantization)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if args.dense:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).to(args.device).eval()
    elif args.profile == PROFILE_OFF and args.activation == "none":
        model = hf.load_dense(args.checkpoint, device=args.device)
    else:  # `rows`: a piece of few tokens is computed graded by the server too
        model = hf.load_reference(args.checkpoint, profile=args.profile, activation=args.activation, device=args.device)
    likelihood, size, words = 0.0, 0, 0
    for text in documents(args.documents, args.field):
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        likelihood += sum(log_likelihood(model, *piece) for piece in pieces(tokens, prefix, args.max_length - RESERVED))
        size += len(text.encode())
        words += len(re.split(r"\s+", text))
    print(f"byte_perplexity {math.exp(-likelihood / size):.6f}")
    print(f"word_perplexity {math.exp(-likelihood / words):.6f}")
    print(f"bits_per_byte {-likelihood / size / math.log(2):.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
