"""Model folders of given sizes with random weights, for measuring speed: a Llama, quantized by us, by others, or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import shapes
import torch
from legal_sizes import Shape
from safetensors.torch import save_file
from torch import Tensor

from vllm_tilequant import schema as s
from vllm_tilequant.kernels import layout

#: Linears that read the same input; what that input looks like in a model whose products all have unit variance.
GROUPS = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
PROFILES = ("4.0", "3.0")
#: Standard deviation of `shapes.draw_weight` before scaling: codes are uniform, scales 2^-bits.
DRAWN_STD = 0.29
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}


def inputs_of(group: str, context: int, generator: torch.Generator, count: int = 1 << 18) -> Tensor:
    """Samples of one group's inputs: normalized states, an average of values over `context` tokens, a gated product."""
    x = torch.randn(count, generator=generator)
    if group == "self_attn.o":  # softmax weights of unit-variance scores: their squares sum to e / context
        return x * math.sqrt(math.e / context)
    if group == "mlp.down":
        return torch.nn.functional.silu(torch.randn(count, generator=generator)) * x
    return x


def thresholds(group: str, context: int, generator: torch.Generator) -> Tensor:
    """[profiles, 4] float32: quantiles that give the inputs of a group the shares of `shapes.LEVEL_SHARES`."""
    size = inputs_of(group, context, generator).abs().sort().values
    rows = []
    for profile in PROFILES:
        shares = shapes.LEVEL_SHARES[profile]
        assert shares is not None
        ends = torch.tensor(shares[:-1]).cumsum(0)
        rows.append(size[(ends * len(size)).long()])
    return torch.stack(rows)


def config(
    shape: Shape, layers: int, vocab: int, quantization: dict[str, Any] | None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    out = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    return out | ({"quantization_config": quantization} if quantization else {})


def write_config(folder: Path, shape: Shape, layers: int, vocab: int, quantization: dict[str, Any] | None = None) -> Path:
    """A folder for `--load-format dummy`: no weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(shape, layers, vocab, quantization), indent=1))
    return folder


def write_dense(folder: Path, shape: Shape, layers: int, vocab: int, device: str) -> Path:
    """A complete bf16 checkpoint, a file a layer, to measure how long one takes to load."""
    folder.mkdir(parents=True)
    g = torch.Generator(device).manual_seed(0)

    def dense(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=g, device=device) * k**-0.5).bfloat16().cpu()

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{prefix}{n}.weight": torch.ones(shape.hidden, dtype=torch.bfloat16) for n in norms}
        tensors |= {f"{prefix}{name}.weight": dense(n, k) for name, (n, k) in shape.linears().items()}
        save_file(tensors, folder / f"layer-{layer:03d}.safetensors", metadata={"format": "pt"})
    ends = {"model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16), "lm_head.weight": dense(vocab, shape.hidden)}
    save_file(ends | {"model.embed_tokens.weight": dense(vocab, shape.hidden)}, folder / "ends.safetensors")
    (folder / "config.json").write_text(json.dumps(config(shape, layers, vocab, None), indent=1))
    return folder


def write_tilequant(
    folder: Path, shape: Shape, layers: int, vocab: int, context: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """A complete checkpoint, a file a layer: 60 % of the tiles at 4 bits, thresholds as of `thresholds` at `context` tokens."""
    folder.mkdir(parents=True)
    g = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    modules: dict[str, s.Module] = {}

    def save(tensors: dict[str, Tensor], name: str) -> None:
        save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    def dense(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=torch.Generator(device).manual_seed(size[0]), device=device) * std).to(dtype)

    linears = shape.linears()
    rows = {group: thresholds(group, context, g) for group in GROUPS}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}{n}.weight": torch.ones(shape.hidden, dtype=dtype)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
        for group, members in GROUPS.items():
            for member in members:
                n, k = linears[member]
                weight = shapes.draw_weight(n, k, device, seed=len(modules))
                weight.tile_scale.mul_(1 / (DRAWN_STD * math.sqrt(k)))
                tensors |= {
                    f"{prefix}{member}.{suffix}": t for suffix, t in layout.to_tensors(weight, rows[group].clone()).items()
                }
                bits = weight.tile_bits
                modules[prefix + member] = s.Module(
                    out_features=n,
                    in_features=k,
                    tile_counts={b: int((bits == b).sum()) for b in (4, 8)},
                    bias=False,
                    input_group=prefix + group,
                )
        save(tensors, f"layer-{layer:03d}.safetensors")
    ends = {"model.embed_tokens.weight": dense(vocab, shape.hidden), "model.norm.weight": torch.ones(shape.hidden, dtype=dtype)}
    save(ends | {"lm_head.weight": dense(vocab, shape.hidden, std=shape.hidden**-0.5)}, "ends.safetensors")
    quantization = s.QuantizationSchema(
        quant_method=s.QUANT_METHOD,
        format_version=s.FORMAT_VERSION,
        tile=s.TILE,
        max_bits=8,
        transforms=[s.Transform(kind="randomized_hadamard", seed=1)],
        profiles=s.Profiles(names=list(PROFILES), default=PROFILES[0]),
        ignore=["lm_head"],
        modules=modules,
    )
    size = sum(p.stat().st_size for p in folder.iterdir())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config(shape, layers, vocab, quantization.dump(), name), indent=1))
    return folder
