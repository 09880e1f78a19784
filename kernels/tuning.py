"""Launch configurations: the one place with block sizes. A command writes `configs/tuning/<gpu>.json`, serving only reads it.

Of a configuration only `splits` and `warps_k` decide the order in which input tiles are added, and they depend on nothing but
the weight's shape. So a row has the same bits alone and in any batch, whichever of the other fields its number of rows selects.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import torch

logger = logging.getLogger(__name__)

KEY = "decode_bitplane"


@dataclass(frozen=True)
class DecodeConfig:
    """How one weight shape is cut up.

    splits: CTAs of a cluster that share the input tiles of one range of outputs, 1 to 16 (above 8 is beyond the portable size)
    warps_k: warps of a CTA that share input tiles further; each takes whole ones
    warps_n: warps of a CTA over different outputs, for one and two rows; they share the CTA's preparation of the activations
    tiles: output tiles of a warp, 4 or 8, for one and two rows
    stages: depth of a warp's ring, in steps of 16 channels
    many_n, many_tiles: warps_n and tiles for more than two rows; above four rows a warp always has 4 tiles
    """

    splits: int
    warps_k: int
    warps_n: int = 1
    tiles: int = 8
    stages: int = 4
    many_n: int = 1
    many_tiles: int = 4

    def __post_init__(self) -> None:
        warps = self.warps_k * max(self.warps_n, self.many_n)
        if not (1 <= self.splits <= 16 and self.warps_k >= 1 and warps <= 16 and 3 <= self.stages <= 16):
            raise ValueError(f"{self}: wanted splits 1..16, at most 16 warps, stages 3..16")
        if self.tiles not in (4, 8) or self.many_tiles not in (4, 8):
            raise ValueError(f"{self}: wanted 4 or 8 tiles")

    def cut(self, rows: int) -> tuple[int, int]:
        """(output tiles of a warp, warps_n) for a number of rows."""
        if rows <= 2:
            return self.tiles, self.warps_n
        return (self.many_tiles if rows <= 4 else 4), self.many_n


def gpu_key(name: str) -> str:
    """File stem of a GPU: "NVIDIA H200" -> "h200", "NVIDIA A100-SXM4-80GB" -> "a100-sxm4-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


@functools.cache
def _table(gpu: str) -> dict[tuple[int, int], DecodeConfig]:
    path = files("vllm_tilequant") / "configs" / "tuning" / f"{gpu}.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        try:  # a checkout keeps `configs` beside the package
            import vllm_tilequant.configs.tuning as tuning

            data = json.loads((files(tuning) / f"{gpu}.json").read_text())
        except (FileNotFoundError, ModuleNotFoundError):
            logger.warning(
                "no tuned configurations for GPU %r: using the documented default; `tune_decode_bitplane.py` makes them", gpu
            )
            return {}
    fields = DecodeConfig.__dataclass_fields__
    return {(e["n"], e["k"]): DecodeConfig(**{f: e[f] for f in fields if f in e}) for e in data.get(KEY, [])}


def default_config(n: int, k: int, multiprocessors: int) -> DecodeConfig:
    """The documented default: clusters of up to 8 and warps that take at most two input tiles each, up to 8 of them; outputs
    are cut into 256 instead of 512 where the whole would otherwise leave multiprocessors idle."""
    k_tiles = k // 64
    splits = next((s for s in (8, 4, 2) if k_tiles >= 4 * s), 1)
    warps_k = min(8, -(-k_tiles // (2 * splits)))
    tiles = 8 if -(-n // 512) * splits >= multiprocessors else 4
    return DecodeConfig(splits=splits, warps_k=warps_k, tiles=tiles)


@functools.cache
def decode_config(n: int, k: int, device: torch.device) -> DecodeConfig:
    """Configuration of a weight [n, k] on a device: the tuned one of this GPU and shape, else the default."""
    properties = torch.cuda.get_device_properties(device)
    tuned = _table(gpu_key(properties.name)).get((n, k))
    return tuned or default_config(n, k, properties.multi_processor_count)


def dump(gpu: str, configs: dict[tuple[int, int], DecodeConfig], extra: dict[str, Any]) -> str:
    """The JSON text of a tuning file."""
    rows = [{"n": n, "k": k, **asdict(c)} for (n, k), c in sorted(configs.items())]
    head = {"gpu": gpu, **extra}
    body = ",\n".join(f"    {json.dumps(r)}" for r in rows)
    return json.dumps(head)[:-1] + f',\n  "{KEY}": [\n{body}\n  ]\n}}\n'
