"""Which tensor- and pipeline-parallel sizes a checkpoint can be cut into: every cut must fall on the border of a tile."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.reader import Checkpoint

LARGEST = 64
#: Linears that servers cut along their inputs, by the last part of the name; all others are cut along their outputs.
ROW_PARALLEL = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h", "wo"})


@dataclass(frozen=True)
class Legality:
    """faults: why not, by module; legal: all sizes up to `LARGEST` that work."""

    size: int
    faults: list[str]
    legal: list[int]

    @property
    def nearest(self) -> tuple[int | None, int | None]:
        """The next legal sizes below and above."""
        below = [n for n in self.legal if n < self.size]
        above = [n for n in self.legal if n > self.size]
        return (below[-1] if below else None), (above[0] if above else None)


def tensor_parallel(checkpoint: Checkpoint, size: int) -> Legality:
    """Whether `size` ranks can share every linear, as vLLM shares Llama-like models."""
    legal = [n for n in range(1, LARGEST + 1) if not _tp_faults(checkpoint, n)]
    return Legality(size, _tp_faults(checkpoint, size), legal)


def pipeline_parallel(checkpoint: Checkpoint, size: int) -> Legality:
    """Layers stay whole, so that any size up to their number works; stages may be unequal."""
    layers = checkpoint.config.get("num_hidden_layers")
    limit = layers if isinstance(layers, int) else LARGEST
    faults = [] if 1 <= size <= limit else [f"the model has {limit} layers, {size} stages cannot each have one"]
    return Legality(size, faults, list(range(1, limit + 1)))


def _tp_faults(checkpoint: Checkpoint, size: int) -> list[str]:
    if size < 1:
        return [f"{size} ranks: wanted at least 1"]
    faults = []
    heads, kv_heads = (checkpoint.config.get(k) for k in ("num_attention_heads", "num_key_value_heads"))
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    if isinstance(heads, int) and heads % size:
        faults.append(f"{heads} attention heads do not divide among {size} ranks")
    if isinstance(kv_heads, int) and (kv_heads % size if kv_heads >= size else size % kv_heads):
        faults.append(f"{kv_heads} key-value heads neither divide among {size} ranks nor repeat evenly")
    for name, m in checkpoint.schema.modules.items():
        leaf = name.rpartition(".")[2]
        axis, features = ("inputs", m.in_features) if leaf in ROW_PARALLEL else ("outputs", m.out_features)
        ranks = size
        if leaf in ("k_proj", "v_proj") and isinstance(kv_heads, int):
            ranks = min(size, kv_heads)  # with more ranks than heads, ranks hold copies of a head
        if features % (ranks * s.TILE):
            faults.append(f"{name}: {features} {axis} / {ranks} = {features / ranks:g}, not a multiple of {s.TILE}")
    return faults
