"""Sizes of common models, and which tensor-parallel sizes they allow: the table of docs/parallel.md."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tilequant.checkpoint.parallel import Legality, cut_shapes


@dataclass(frozen=True)
class Shape:
    """Sizes as in the model's config.json. fused: its checkpoint stores qkv_proj and gate_up_proj."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    fused: bool = False

    def linears(self) -> dict[str, tuple[int, int]]:
        """name -> (outputs, inputs) of one layer."""
        q, kv, up = self.heads * self.head, self.kv_heads * self.head, self.intermediate
        if self.fused:
            inside = {"self_attn.qkv_proj": q + 2 * kv, "mlp.gate_up_proj": 2 * up}
        else:
            inside = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
            inside |= {"mlp.gate_proj": up, "mlp.up_proj": up}
        outside = {"self_attn.o_proj": q, "mlp.down_proj": up}
        return {k: (n, self.hidden) for k, n in inside.items()} | {k: (self.hidden, n) for k, n in outside.items()}

    def legality(self, size: int) -> Legality:
        return cut_shapes(self.linears(), {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}, size)


MODELS = (
    Shape("SmolLM2 135M", 576, 1536, 9, 3, 64),
    Shape("SmolLM2 360M", 960, 2560, 15, 5, 64),
    Shape("SmolLM2 1.7B", 2048, 8192, 32, 32, 64),
    Shape("SmolLM3 3B", 2048, 11008, 16, 4, 128),
    Shape("Llama 3.2 1B", 2048, 8192, 32, 8, 64),
    Shape("Llama 3.2 3B", 3072, 8192, 24, 8, 128),
    Shape("Llama 3.1 8B", 4096, 14336, 32, 8, 128),
    Shape("Llama 3.3 70B", 8192, 28672, 64, 8, 128),
    Shape("Llama 3.1 405B", 16384, 53248, 128, 8, 128),
    Shape("Qwen2.5 0.5B", 896, 4864, 14, 2, 64),
    Shape("Qwen2.5 1.5B", 1536, 8960, 12, 2, 128),
    Shape("Qwen2.5 3B", 2048, 11008, 16, 2, 128),
    Shape("Qwen2.5 7B", 3584, 18944, 28, 4, 128),
    Shape("Qwen2.5 14B", 5120, 13824, 40, 8, 128),
    Shape("Qwen2.5 32B", 5120, 27648, 40, 8, 128),
    Shape("Qwen2.5 72B", 8192, 29568, 64, 8, 128),
    Shape("Qwen3 0.6B", 1024, 3072, 16, 8, 128),
    Shape("Qwen3 1.7B", 2048, 6144, 16, 8, 128),
    Shape("Qwen3 4B", 2560, 9728, 32, 8, 128),
    Shape("Qwen3 8B", 4096, 12288, 32, 8, 128),
    Shape("Qwen3 14B", 5120, 17408, 40, 8, 128),
    Shape("Qwen3 32B", 5120, 25600, 64, 8, 128),
    Shape("Mistral 7B v0.3", 4096, 14336, 32, 8, 128),
    Shape("Mistral Nemo 12B", 5120, 14336, 32, 8, 128),
    Shape("Mistral Small 24B", 5120, 32768, 32, 8, 128),
    Shape("Mistral Large 123B", 12288, 28672, 96, 8, 128),
    Shape("Gemma 3 1B", 1152, 6912, 4, 1, 256),
    Shape("Gemma 3 4B", 2560, 10240, 8, 4, 256),
    Shape("Gemma 3 12B", 3840, 15360, 16, 8, 256),
    Shape("Gemma 3 27B", 5376, 21504, 32, 16, 128),
    Shape("Phi-3 mini", 3072, 8192, 32, 32, 96, fused=True),
    Shape("Phi-3 medium", 5120, 17920, 40, 10, 128, fused=True),
    Shape("Phi-4 mini", 3072, 8192, 24, 8, 128, fused=True),
    Shape("Phi-4 14B", 5120, 17920, 40, 10, 128, fused=True),
)


def row(shape: Shape) -> dict[str, str]:
    """Sizes of the layers, the legal ones, and what stands in the way of the next power of two."""
    legal = shape.legality(1).legal
    doubled = next((n for n in (2, 4, 8, 16, 32, 64) if n not in legal), None)
    faults = [] if doubled is None else shape.legality(doubled).faults
    return {
        "model": shape.name,
        "hidden": str(shape.hidden),
        "inner": str(shape.intermediate),
        "heads": f"{shape.heads} / {shape.kv_heads}",
        "legal sizes": ", ".join(map(str, legal)),
        "why not the next power of two": f"{doubled}: {faults[0]}" if faults else "",
    }
