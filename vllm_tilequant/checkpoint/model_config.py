"""What config.json says of the model around the quantized linears, held against the tensors that are there.

A loader builds the model from these numbers before it looks at a single tensor: a billion layers or a vocabulary of
2^40 entries must be refused here, not by the machine's memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_tilequant.checkpoint.files import Header

#: Integer fields that loaders allocate by, and far more than any model has.
LIMITS = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 11,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 13,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "num_experts": 1 << 13,
    "num_local_experts": 1 << 13,
    "n_routed_experts": 1 << 13,
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
EMBEDDING = "embed_tokens.weight"
_QUANTIZED_HEAD = "lm_head.weight_plane0"


def model_config_faults(config: Mapping[str, Any], headers: Mapping[str, Header]) -> list[str]:
    """Sizes out of bounds or not backed by tensors, and demands for code from the folder; one line each."""
    faults = []
    for where, part in _parts(config):
        for field, limit in LIMITS.items():
            value = part.get(field)
            # null means "derive it"; lists (one size per layer) are for the model class to judge
            if value is None or isinstance(value, list):
                continue
            if type(value) is not int or not 1 <= value <= limit:
                faults.append(f"{where}{field} is {value!r}, wanted an integer from 1 to {limit}")
    if faults:
        return faults
    text = next((part for where, part in _parts(config) if where), config)
    stored = {int(m.group(1)) for name in headers if (m := _LAYER.search(name))}
    promised = text.get("num_hidden_layers")
    if isinstance(promised, int) and stored and promised > max(stored) + 1:
        faults.append(f"num_hidden_layers is {promised}, the files hold layers up to {max(stored)}")
    if any(name.endswith(_QUANTIZED_HEAD) for name in headers) and config.get("tie_word_embeddings") is not False:
        faults.append("tie_word_embeddings is not false, though lm_head is quantized: loaders would take the embeddings for it")
    for name, header in headers.items():
        if name.endswith(EMBEDDING):
            wanted = (text.get("vocab_size"), text.get("hidden_size"))
            if None not in wanted and header.shape != wanted:
                faults.append(f"{name}: {list(header.shape)} in the checkpoint, vocab_size and hidden_size say {list(wanted)}")
    return faults


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config itself and, for models of several parts, its language model."""
    yield "", config
    if isinstance(text := config.get("text_config"), dict):
        yield "text_config.", text
