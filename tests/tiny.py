"""A tiny Llama and random records for calibration tests in memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 96


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
