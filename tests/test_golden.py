"""A committed checkpoint of a few KB pins format version 1: what it says must not change, whoever reads or writes it.

`python tests/test_golden.py` writes it anew; doing so is a change of the format and belongs into CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from toy import write_toy
from vllm_tilequant.checkpoint.reader import Checkpoint
from vllm_tilequant.checkpoint.verify import verify
from vllm_tilequant.kernels import layout, reference

GOLDEN = Path(__file__).parent / "golden"
SHAPE = dict(hidden=64, intermediate=128, layers=1, heads=1, kv_heads=1, vocab=16, kind="mixed2468", tokenizer=False)


def reading(folder: Path) -> dict:
    """What a reader must find: codes as hashes, graded and static outputs of a fixed input as numbers."""
    checkpoint = Checkpoint.open(folder)
    x = torch.linspace(-2, 2, 128, dtype=torch.float64).sin().float()
    out = {}
    for name, m in checkpoint.schema.modules.items():
        module = checkpoint.module(name)
        matrices = checkpoint.transforms[module.weight.output_transform.long()]
        rows = x[: m.in_features][None]
        out[name] = {
            "codes": hashlib.sha256(layout.unpack(module.weight).numpy().tobytes()).hexdigest(),
            "static": [round(v, 6) for v in reference.linear_ref(rows, module.weight, matrices, int8=True)[0, :4].tolist()],
            "graded": [
                [round(v, 6) for v in reference.decode_bitplane_ref(rows, module.weight, matrices, t)[0, :4].tolist()]
                for t in module.thresholds
            ],
        }
    return out


def test_the_golden_checkpoint_reads_as_it_did():
    assert (
        verify(GOLDEN).tile_counts == json.loads((GOLDEN / "expected.json").read_text(), object_hook=_int_keys)["tile_counts"]
    )
    expected = json.loads((GOLDEN / "expected.json").read_text())["modules"]
    found = reading(GOLDEN)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert found[name]["codes"] == want["codes"], name
        for kind in ("static", "graded"):
            assert torch.allclose(torch.tensor(found[name][kind]), torch.tensor(want[kind]), atol=2e-5), (name, kind)


def test_packing_the_golden_codes_again_gives_the_same_tensors():
    checkpoint, stored = Checkpoint.open(GOLDEN), load_file(GOLDEN / "model.safetensors")
    for name in checkpoint.schema.modules:
        module = checkpoint.module(name)
        w = module.weight
        packed = layout.pack(layout.unpack(w), w.tile_bits, w.tile_scale, w.output_transform)
        for suffix, tensor in layout.to_tensors(packed, module.thresholds).items():
            assert torch.equal(tensor, stored[f"{name}.{suffix}"]), (name, suffix)


def _int_keys(d: dict) -> dict:
    return {int(k) if k.isdigit() else k: v for k, v in d.items()}


if __name__ == "__main__":
    write_toy(GOLDEN, **SHAPE)
    facts = {"tile_counts": verify(GOLDEN).tile_counts, "modules": reading(GOLDEN)}
    (GOLDEN / "expected.json").write_text(json.dumps(facts, indent=1) + "\n")
