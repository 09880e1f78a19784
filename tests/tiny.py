"""A tiny Llama and random records in memory, and a tiny model folder with text in its words, to calibrate on."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from toy import write_tokenizer

VOCAB = 96
CONFIG = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=256,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=True,
)


def llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=VOCAB, initializer_range=0.08, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    return model, linears


def records(n=2, length=40, seed=1):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (n, 1, length), generator=g)
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def write_model(folder, **changes):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(CONFIG | changes))).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, 256)
    return folder


def write_text(path):
    g = torch.Generator().manual_seed(0)
    words = torch.randint(3, 256, (3000,), generator=g).tolist()
    path.write_text(" ".join(f"w{i}" for i in words))
    return path


def hashes(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir()) if f.suffix == ".safetensors"}
