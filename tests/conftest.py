"""Which environment runs what: tests marked `serve` need vLLM, those marked `calibrate` need llm-compressor.

Their pins exclude each other, so no single environment has both. `make test` runs the suite once in each, with `--side`
naming what that run must not skip.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # cases.py and tolerances.py (importlib mode has no package to find them in)

NEEDS = {"serve": "vllm", "calibrate": "llmcompressor"}
FILES = {"serve": "test_serve_*.py", "calibrate": "test_calibrate_*.py"}
collect_ignore_glob = [FILES[side] for side, package in NEEDS.items() if importlib.util.find_spec(package) is None]


def pytest_addoption(parser):
    parser.addoption("--side", choices=sorted(NEEDS), help="run only the tests of this environment, and have it installed")


def pytest_report_header(config):
    return f"left out here (package not installed): {', '.join(collect_ignore_glob) or 'nothing'}"


def pytest_collection_modifyitems(config, items):
    side = config.getoption("--side")
    if side and importlib.util.find_spec(NEEDS[side]) is None:
        raise pytest.UsageError(f"--side {side} needs the package {NEEDS[side]}")
    if side == "serve":  # the rest runs once, in the calibration environment
        items[:] = [item for item in items if item.get_closest_marker("serve")]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny source model (transformers is imported only where this is asked for)."""
    from tiny import write_model

    return write_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A calibration text in that model's words."""
    from tiny import write_text

    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A small checkpoint with biases that tensor parallelism can halve."""
    from toy import ROTATED, write_toy

    return write_toy(
        tmp_path_factory.mktemp("toy") / "toy", bias=True, heads=4, kv_heads=2, hidden=256, intermediate=256, rotated=ROTATED
    )


@pytest.fixture
def tilequant(capsys):
    """Run a verb of the command; returns (exit code, stdout, stderr)."""
    from vllm_tilequant import cli

    def call(*arguments):
        with pytest.raises(SystemExit) as e:
            cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return e.value.code or 0, out.out, out.err

    return call
