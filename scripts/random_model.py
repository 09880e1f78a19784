"""Write a model with random weights and a tokenizer's worth of vocabulary, to try an architecture's structure.

    python scripts/random_model.py qwen3 OUT_DIR --tokenizer FOLDER [--layers 4 --hidden 256]

Says nothing about quality: random weights have no knowledge to lose. Shapes are small multiples of 64.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
}


def main() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder whose tokenizer the model takes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    vocabulary = AutoConfig.from_pretrained(args.tokenizer).vocab_size
    config = AutoConfig.for_model(
        args.family,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=vocabulary,
        initializer_range=0.05,  # with the usual 0.02 a small model predicts the same for every text
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.out)
    for file in args.tokenizer.glob("*token*"):
        if file.suffix in (".json", ".model", ".txt"):
            shutil.copy(file, args.out)
    print(f"{args.out}: {FAMILIES[args.family]}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, random")


if __name__ == "__main__":
    main()
