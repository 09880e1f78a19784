"""Tile-mixed 4/8-bit weights with graded bit-plane decoding, for stock vLLM.

Importing this package starts neither CUDA, Triton nor vLLM; `register` is what vLLM's plugin loader calls.
"""

from pathlib import Path

__all__ = ["register"]

# In a checkout `kernels`, `calibrate` and `configs` lie beside this folder, not in it. An editable install does not find a
# namespace package below a regular one by itself; the path entry does.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels" / "layout.py").is_file():
    __path__.append(str(_here.parent))


def register() -> None:
    """Make `--quantization tilequant` known to vLLM. Called in every process of a server; cheap and re-entrant."""
    from vllm_tilequant.config import register_config

    register_config()
