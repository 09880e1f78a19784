"""Tiny tilequant checkpoints with random weights, written without the calibration side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cases import make_map
from vllm_tilequant import schema as s
from vllm_tilequant.kernels import layout

MEMBERS = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
#: Groups whose inputs a test rotates: one that a rank cuts along its inputs, and one that vLLM fuses.
ROTATED = ("self_attn.o", "mlp.gate_up")
TRANSFORMS = [
    s.Transform(kind="identity"),
    s.Transform(kind="randomized_hadamard", seed=1),
    s.Transform(kind="randomized_hadamard", seed=2),
]


def quantize_tensor(weight, tile_bits, transform_index, transforms=TRANSFORMS) -> layout.PackedWeight:
    """Round-to-nearest with one absmax scale per tile. weight: [N, K] -> packed."""
    matrices = layout.transform_stack(transforms)[transform_index.long()]
    rotated = layout.rotate_outputs(weight.double(), matrices)
    n, k = weight.shape
    half = 2.0 ** (tile_bits.double() - 1)
    tiles = rotated.view(n // 64, 64, k // 64, 64)
    scale = (tiles.abs().amax((1, 3)) / half).clamp_min(1e-8).float()
    q = (rotated / layout.expand_tiles(scale).double()).round()
    h = layout.expand_tiles(half)
    codes = (q.clamp(-h, h - 1) + h).to(torch.uint8)
    return layout.pack(codes, tile_bits, scale, transform_index)


def write_toy(
    folder: str | Path,
    *,
    hidden: int = 128,
    intermediate: int = 192,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    vocab: int = 256,
    kind: str = "mixed48",
    bias: bool = False,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    tokenizer: bool = True,
    rotated: tuple[str, ...] = (),
    head: bool = False,
) -> Path:
    """Write a complete random-weights checkpoint (Llama, or Qwen2 with `bias`); returns the folder.

    The maps of q, k, v and of gate, up differ; every output tile takes one of three transforms; profiles "2.0", "3.0", "4.0".
    rotated: of `MEMBERS`, whose inputs are rotated; head: the output head is quantized too, and not tied.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    g = torch.Generator().manual_seed(seed)
    head_dim = 64
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }

    def randn(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    tensors = {
        "model.embed_tokens.weight": randn(vocab, hidden).to(dtype),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    tied = tied and not head
    if not tied and not head:
        tensors["lm_head.weight"] = randn(vocab, hidden).to(dtype)
    modules = {}
    base = torch.tensor([[0.3, 0.8, 1.6, 3.0], [0.15, 0.4, 1.0, 2.0], [0.05, 0.15, 0.4, 1.0]])
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = (1 + randn(hidden, scale=0.1)).to(dtype)
        for group, members in MEMBERS.items():
            thresholds = base * (0.5 + torch.rand(1, generator=g))
            for member in members:
                n, k = shapes[member]
                bits = make_map(kind, n // 64, k // 64, g)
                index = torch.randint(len(TRANSFORMS), (n // 64,), dtype=torch.uint8, generator=g)
                packed = quantize_tensor(randn(n, k, scale=k**-0.5 * 1.5), bits, index)
                name = prefix + member
                has_bias = bias and group == "self_attn.qkv"
                own = layout.to_tensors(packed, thresholds.clone())
                if has_bias:
                    own[s.BIAS] = randn(n, scale=0.3).to(dtype)
                tensors |= {f"{name}.{suffix}": t.contiguous() for suffix, t in own.items()}
                counts = {b: int((bits == b).sum()) for b in s.TILE_BITS if int((bits == b).sum())}
                modules[name] = s.Module(
                    out_features=n, in_features=k, tile_counts=counts, bias=has_bias, input_group=prefix + group,
                    input_transform=2 if group in rotated else None,
                )  # fmt: skip
    if head:
        bits = make_map("all8", vocab // 64, hidden // 64, g)
        packed = quantize_tensor(randn(vocab, hidden), bits, torch.ones(vocab // 64, dtype=torch.uint8))
        tensors |= {f"lm_head.{suffix}": t.contiguous() for suffix, t in layout.to_tensors(packed, base / 10).items()}
        modules["lm_head"] = s.Module(
            out_features=vocab, in_features=hidden, tile_counts={8: bits.numel()}, input_group="lm_head"
        )
    quantization = s.QuantizationSchema(
        quant_method=s.QUANT_METHOD,
        format_version=s.FORMAT_VERSION,
        required_features=[s.INPUT_TRANSFORM] if rotated else [],
        tile=s.TILE,
        max_bits=8,
        transforms=TRANSFORMS,
        profiles=s.Profiles(names=["2.0", "3.0", "4.0"], default="3.0"),
        ignore=[] if head else ["lm_head"],
        modules=modules,
    )
    config = {
        "architectures": ["Qwen2ForCausalLM" if bias else "LlamaForCausalLM"],
        "model_type": "qwen2" if bias else "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "quantization_config": quantization.dump(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}))
    if tokenizer:
        write_tokenizer(folder, vocab)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer of the words w3, w4, ... behind three special tokens."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    special = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for t, i in list(words.items())[:3]
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_other(folder: Path, path: Path) -> Path:
    """A checkpoint with the maps and the config of another; other scales, thresholds, biases and norms.

    Not embeddings: on a CPU vLLM's own linears compute with a packed copy of theirs, which its reload does not renew.
    """
    shutil.copytree(folder, path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, t in tensors.items():
            if name.endswith((s.SCALE, s.THRESHOLDS)):
                tensors[name] = t * 1.25
            elif name.endswith((s.BIAS, "norm.weight")):
                tensors[name] = t * 0.75
        save_file(tensors, file, metadata={"format": "pt"})
    return path
