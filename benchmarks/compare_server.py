"""Greedy text of a running server against greedy text of the same checkpoint in transformers, token by token.

    vllm serve FOLDER --quantization tilequant --dtype float32 --max-model-len 512 \\
        --additional-config '{"tilequant": {"profile": "3.0", "activation": "group64"}}'
    python benchmarks/compare_server.py --checkpoint FOLDER --server http://127.0.0.1:8000/v1 --profile 3.0 --set steady

Both sides are in float32 and take one prompt at a time, so that every product sees the same number of rows: the prompt's,
then one per token. The reference is not the server's code path (see `vllm_tilequant/hf.py`). Exit code 0 only if all texts
are equal, 1 if one differs, 2 if the comparison could not be made.

INT8 rounding and thresholds are steps: a value beside one falls either way by the last bit of a float32, and what follows
carries the difference on. So a prompt that differs is followed by a control: the reference against itself, with its embeddings
off by 2^-23. Where the control parts from the reference too, the difference is no evidence against the server; where it never
does, it is. With grading or INT8 activations use `--set steady`.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from vllm_tilequant import hf
from vllm_tilequant.kernels.dispatch import GRADED_ROWS
from vllm_tilequant.schema import ACTIVATIONS, PROFILE_OFF

#: Of more tokens than the graded limit each, so that the prompt itself runs at stored precision.
PROMPTS = (
    "The lighthouse keeper wrote one line in his diary every evening, and tonight the line was about",
    "To bake a loaf of bread at home you need flour, water, salt and yeast. First, mix the",
    "A list of five things that a gardener does in early spring before the first flowers open:",
    "The train from the coast was late again, so the two sisters sat on the bench and talked about",
    "Water boils at a lower temperature on a high mountain than at the sea because the pressure",
    "def count_words(text):\n    # Return a dictionary with the number of times each word occurs\n",
    "Question: Which planet of the solar system has the most moons, and how were they found?\nAnswer:",
    "In the year the old bridge was closed, the people of the valley had to cross the river by",
    "Dear Sir or Madam, I am writing to ask whether the library will be open on the first Sunday of",
    "Three friends share a bag of twelve apples equally. Each friend eats one apple, so each one has",
)
#: Texts whose continuation the sample model is sure of: in graded references of two checkpoints (calibrated on different texts)
#: the best token led by 0.5 logits or more in every one of 32 steps, so that last-bit noise does not change it.
STEADY = (
    "The even numbers in order are 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24,",
    "The wheel turns. The river flows. The wheel turns. The river flows. The wheel turns. The river flows. The wheel",
    "Left, right, left, right, left, right, left, right, left, right, left, right, left,",
    "2001, 2002, 2003, 2004, 2005, 2006, 2007, 2008, 2009, 2010, 2011,",
    "1901, 1902, 1903, 1904, 1905, 1906, 1907, 1908, 1909, 1910,",
    "10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130,",
    "Page 11, Page 12, Page 13, Page 14, Page 15, Page 16, Page 17,",
    "1. one\n2. one\n3. one\n4. one\n5. one\n6. one\n7. one\n8.",
    "1801 1802 1803 1804 1805 1806 1807 1808 1809 1810",
    "The bell rings. The door opens. The bell rings. The door opens. The bell rings. The door opens. The bell",
)
PROMPT_SETS = {"open": PROMPTS, "steady": STEADY}


@dataclass(frozen=True)
class Step:
    """One greedy token and the distance in logits to the second best: small ones may fall either way between two programs."""

    token: int
    margin: float


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], tokens: int, noise: torch.Generator | None = None) -> list[Step]:
    """`tokens` greedy tokens after `prompt` with a KV cache: one call of len(prompt) rows, then calls of one row.

    noise: multiply the embeddings by 1 +- 2^-23 at random.
    """
    ids, cache, steps = torch.tensor([prompt], device=model.device), None, []
    for _ in range(tokens):
        embeddings = model.get_input_embeddings()(ids)
        if noise is not None:
            signs = torch.randint(2, embeddings.shape, generator=noise) * 2 - 1
            embeddings = embeddings * (1 + 2.0**-23 * signs.to(embeddings.device))
        out = model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].float().topk(2)
        steps.append(Step(int(best.indices[0]), float(best.values[0] - best.values[1])))
        ids = best.indices[:1].view(1, 1)
    return steps


def parted(model: PreTrainedModel, prompt: list[int], want: list[Step], runs: int) -> int:
    """How many of `runs` noisy runs give other tokens than `want`."""
    tokens = [step.token for step in want]
    noisy = (greedy(model, prompt, len(want), torch.Generator().manual_seed(i)) for i in range(runs))
    return sum([step.token for step in steps] != tokens for steps in noisy)


def call(url: str, payload: dict[str, Any] | None = None, timeout: float = 600) -> dict[str, Any]:
    """GET, or POST of JSON; raises `OSError` with the server's own words."""
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as e:
        raise OSError(f"{url}: {e.code} {e.read().decode(errors='replace')[:500]}") from None
    except urllib.error.URLError as e:
        raise OSError(f"{url}: {e.reason}: is the server running?") from None


def served_tokens(server: str, model: str, prompt: list[int], tokens: int) -> list[int]:
    """The server's greedy tokens, end-of-text not respected."""
    payload = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        # a cached prefix would leave a prompt of fewer rows, which may then be computed graded
        "cache_salt": uuid.uuid4().hex,
    }
    choice = call(f"{server}/completions", payload)["choices"][0]
    if not choice.get("token_ids"):
        raise OSError(f"{server} gives no token_ids: it is too old, or not vLLM")
    return choice["token_ids"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--profile", help="what the server runs with; the checkpoint's default if left out")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="group64", help="what the server runs with")
    parser.add_argument("--set", choices=PROMPT_SETS, default="open", help="prompts with many or with one plain continuation")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--controls", type=int, default=3, help="noisy runs of the reference for a prompt that differs")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    try:
        return compare(args)
    except (OSError, ValueError) as e:
        print(f"compare_server: {e}", file=sys.stderr)
        return 2


def compare(args: argparse.Namespace) -> int:
    server = args.server.rstrip("/")
    served = call(f"{server}/models")["data"][0]["id"]
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    if args.profile == PROFILE_OFF and args.activation == "none":
        model = hf.load_dense(args.checkpoint, device=args.device)
    else:
        model = hf.load_reference(
            args.checkpoint, profile=args.profile, activation=args.activation, device=args.device, graded="rows"
        )
    equal = 0
    prompts = PROMPT_SETS[args.set][: args.prompts]
    for number, text in enumerate(prompts, 1):
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(prompt) <= GRADED_ROWS:
            raise ValueError(f"prompt {number} has {len(prompt)} tokens with this tokenizer, wanted more than {GRADED_ROWS}")
        want = greedy(model, prompt, args.tokens)
        got = served_tokens(server, served, prompt, args.tokens)
        first = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a.token != b), None)
        if first is None and len(got) == len(want):
            equal += 1
            print(f"{number:2} equal, {len(prompt)} + {len(got)} tokens: {tokenizer.decode(got)[:60]!r}")
            continue
        first = min(len(got), len(want)) if first is None else first
        print(f"{number:2} DIFFERS at token {first} of {len(want)}")
        if first < min(len(got), len(want)):
            step = want[first]
            print(f"   reference {tokenizer.decode([step.token])!r}, leading its second best by {step.margin:.2e}")
            print(f"   server    {tokenizer.decode([got[first]])!r}")
            if args.controls:
                n = parted(model, prompt, want[: first + 1], args.controls)
                print(f"   control: {n} of {args.controls} runs with last-bit noise part from the reference by this token, too")
        else:
            print(f"   the server gave {len(got)} tokens")
    print(f"{equal} of {len(prompts)} texts equal")
    return 0 if equal == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
