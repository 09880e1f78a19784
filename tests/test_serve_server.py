"""A real `vllm serve` on loopback: its greedy tokens against transformers, and how it ends on bad input."""

import json
import os
import subprocess
import tempfile

import pytest
from safetensors.torch import load_file, save_file
from serving import (
    ENVIRONMENT,
    LOGPROB_BOUNDS,
    PARALLEL_TOY,
    PROMPTS,
    START_SECONDS,
    TRACED,
    command,
    compare,
    free_port,
    greedy,
    one_thread,  # noqa: F401 - a fixture
    reference_model,
    server,
    settings,
)

import broken_starts
from toy import ROTATED, write_toy
from vllm_tilequant.hf import load_dense

pytestmark = pytest.mark.serve


def test_without_grading_and_activation_codes_it_is_the_dequantized_model(tmp_path):
    folder = write_toy(tmp_path / "toy", tied=True, kv_heads=2)
    options = (*settings(profile="off", activation="none"), "--enforce-eager", "--quantization", "tilequant")
    model = load_dense(folder)
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with server(folder, tmp_path / "log", *options) as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["static"])
    assert "tilequant: profile off (graded up to 0 rows), activation none" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("traced", [False, True])
def test_default_profile_is_the_float64_reference(tmp_path, traced):
    """Once traced, since a traced server must still choose by the rows of each call; once eager, on the toy that
    test_serve_parallel.py serves from several ranks: the text is the same there, token by token."""
    folder = write_toy(tmp_path / "toy", **(dict(seed=40, rotated=ROTATED, head=True) if traced else PARALLEL_TOY))
    options, environment = ((), TRACED) if traced else (("--enforce-eager",), {})
    model = reference_model(folder, "3.0")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with server(folder, tmp_path / "log", *options, **environment) as client:
        compare(client, folder, wanted, LOGPROB_BOUNDS["graded"])
    assert "tilequant: profile 3.0 (graded up to 8 rows), activation group64" in (tmp_path / "log").read_text()


def without_a_tensor(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight_tile_scale"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_method(method):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        if method is None:
            del config["quantization_config"]
        else:
            config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize("name", ["scale not a number", "embedding not finite", "index leads outside"])
def test_a_broken_checkpoint_ends_the_server_before_its_engine_starts(tmp_path, name):
    """All classes and their times: `broken_starts.py`, docs/fuzzing.md."""
    base = write_toy(tmp_path / "toy", kind="mixed2468", bias=True, kv_heads=2)
    _, code, said = broken_starts.start(broken_starts.copy_of(base, tmp_path / "broken", name))
    assert broken_starts.outcome(name, code, said) == "validator", said[-8000:]
    assert "EngineCore" not in said


@pytest.mark.parametrize(
    "change, options, environment, message",
    [
        pytest.param(without_a_tensor, (), {}, "model.layers.1.mlp.up_proj.weight_tile_scale: missing", id="missing tensor"),
        pytest.param(with_method("gptq"), (), {}, "does not match the quantization method specified", id="foreign method"),
        pytest.param(with_method(None), (), {}, "Cannot find the config file for tilequant", id="not quantized"),
        pytest.param(
            lambda folder: None,
            settings(profile="5.0"),
            {},
            "profile is '5.0', legal values are ['2.0', '3.0', '4.0', 'full', 'off']",
            id="unknown profile",
        ),
        pytest.param(
            lambda folder: None, (), {"VLLM_PLUGINS": ""}, "Unknown quantization method: tilequant", id="plugin blocked"
        ),
    ],
)
def test_bad_input_ends_the_server_with_one_sentence(tmp_path, change, options, environment, message):
    folder = write_toy(tmp_path / "toy", layers=2)
    change(folder)
    with tempfile.TemporaryDirectory(prefix="tq-") as scratch:
        ended = subprocess.run(
            command(folder, free_port(), "--enforce-eager", "--quantization", "tilequant", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | environment | {"TMPDIR": scratch},
            text=True,
            timeout=START_SECONDS,
        )
    assert ended.returncode != 0
    assert message in ended.stdout, ended.stdout[-8000:]
