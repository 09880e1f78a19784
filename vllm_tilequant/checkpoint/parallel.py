"""Which tensor- and pipeline-parallel sizes a checkpoint can be cut into: every cut must fall on the border of a tile.

One rule for three places: `tilequant inspect` and `serve` before a server starts, the plugin before it reads a weight, and the
table in docs/parallel.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.reader import Checkpoint

LARGEST = 64
#: Linears that servers cut along their inputs, by the last part of the name.
ROW_PARALLEL = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h", "wo"})
#: Linears that every rank holds whole. All others are cut along their outputs.
REPLICATED = frozenset({"gate", "router", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"})
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


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


@dataclass(frozen=True)
class Cut:
    """One range of a linear's features that is shared out on its own. most: ranks beyond it hold copies (of KV heads)."""

    what: str
    features: int
    most: int = LARGEST


def tensor_parallel(checkpoint: Checkpoint, size: int) -> Legality:
    """Whether `size` ranks can share every linear, as vLLM shares Llama-like models."""
    return cut_linears(checkpoint.schema.modules, checkpoint.config, size)


def cut_linears(modules: Mapping[str, s.Module], config: Mapping[str, Any], size: int) -> Legality:
    """The same for modules under their names in the checkpoint; config: the model's, as config.json has it."""
    shapes = {name: (m.out_features, m.in_features) for name, m in modules.items()}
    return cut_shapes(shapes, config, size)


def cut_shapes(shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any], size: int) -> Legality:
    """The same for name -> (outputs, inputs)."""
    legal = [n for n in range(1, LARGEST + 1) if not _tp_faults(shapes, config, n)]
    return Legality(size, _tp_faults(shapes, config, size), legal)


def pipeline_parallel(checkpoint: Checkpoint, size: int) -> Legality:
    """Layers stay whole, so that any size up to their number works; stages may be unequal."""
    layers = _text(checkpoint.config).get("num_hidden_layers")
    limit = layers if isinstance(layers, int) else LARGEST
    faults = [] if 1 <= size <= limit else [f"the model has {limit} layers, {size} stages cannot each have one"]
    return Legality(size, faults, list(range(1, limit + 1)))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config of several parts."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _tp_faults(shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any], size: int) -> list[str]:
    if size < 1:
        return [f"{size} ranks: wanted at least 1"]
    faults = []
    heads, kv_heads = (_text(config).get(k) for k in ("num_attention_heads", "num_key_value_heads"))
    kv_heads = kv_heads if isinstance(kv_heads, int) else heads
    if isinstance(heads, int) and heads % size:
        faults.append(f"{heads} attention heads do not divide among {size} ranks")
    if isinstance(kv_heads, int) and (kv_heads % size if kv_heads >= size else size % kv_heads):
        faults.append(f"{kv_heads} key-value heads neither divide among {size} ranks nor repeat evenly")
    layers: dict[tuple[str, str], list[str]] = {}  # (name with a gap for the layer's number, what is wrong) -> names
    for name, (n, k) in shapes.items():
        for cut in _cuts(name.rpartition(".")[2], n, k, heads, kv_heads):
            ranks = min(size, cut.most)
            if cut.features % (ranks * s.TILE):
                wrong = f"{cut.features} {cut.what} / {ranks} = {cut.features / ranks:g}, not a multiple of {s.TILE}"
                layers.setdefault((_LAYER.sub("{}", name, count=1), wrong), []).append(name)
    return faults + [f"{_joined(pattern, names)}: {wrong}" for (pattern, wrong), names in layers.items()]


def _cuts(leaf: str, n: int, k: int, heads: Any, kv_heads: Any) -> Iterator[Cut]:
    """The ranges of one linear that ranks share out. A linear fused in the checkpoint is cut in each of its parts."""
    if leaf in REPLICATED:
        return
    if leaf in ROW_PARALLEL:
        yield Cut("inputs", k)
    elif leaf in ("k_proj", "v_proj") and isinstance(kv_heads, int):
        yield Cut("outputs", n, kv_heads)
    elif leaf == "qkv_proj" and isinstance(heads, int) and isinstance(kv_heads, int):
        head = n // (heads + 2 * kv_heads)
        yield Cut("query outputs", heads * head)
        yield Cut("key and value outputs", kv_heads * head, kv_heads)
    elif leaf == "gate_up_proj":
        yield Cut("gate and up outputs", n // 2)
    else:
        yield Cut("outputs", n)


def _joined(pattern: str, names: list[str]) -> str:
    """One name for a linear in several layers: `model.layers.0-3,7.mlp.up_proj`."""
    if len(names) == 1:
        return names[0]
    numbers = sorted(int(m.group()) for name in names if (m := _LAYER.search(name)))
    runs: list[list[int]] = []
    for i in numbers:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return pattern.format(",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs))
