"""The `tilequant` command as a user meets it: in a process of its own, by exit code and what it prints."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant import cli

COMMAND = [sys.executable, "-c", "from vllm_tilequant.cli import main; main()"]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="evaluation needs the calibration environment"
)


def run(*arguments, env=None):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=env)


def call(capsys, *arguments):
    """main() in this process, which spares the imports: (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as e:
        cli.main([str(a) for a in arguments])
    out = capsys.readouterr()
    return e.value.code, out.out, out.err


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("toy") / "toy")


def test_help_needs_no_extra(tmp_path):
    """With torch, transformers and vLLM hidden, the overview still works: verbs are imported when they run."""
    for name in ("torch", "transformers", "vllm", "llmcompressor"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name={name!r})")
    done = run("--help", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for verb in cli.VERBS:
        assert verb in done.stdout


@pytest.mark.parametrize("package,extra", [("transformers", "calibrate"), ("vllm", "serve")])
def test_a_missing_extra_is_named(package, extra, monkeypatch, capsys, toy):
    def fail(_):
        raise ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.models")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    code, out, err = call(capsys, "verify", toy)
    assert code == 3 and not out
    assert err.count("\n") == 1 and f"pip install 'vllm-tilequant[{extra}]'" in err


def test_a_missing_module_of_our_own_is_a_bug(monkeypatch):
    def fail(_):
        raise ModuleNotFoundError("No module named 'vllm_tilequant.nothing'", name="vllm_tilequant.nothing")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["verify", "folder"])


@pytest.mark.parametrize("arguments", [["frobnicate"], ["verify"], ["verify", "--no-such-option", "x"]])
def test_wrong_usage_is_code_2(arguments, capsys):
    code, _, err = call(capsys, *arguments)
    assert code == 2 and "Traceback" not in err


def test_verify_of_a_sound_checkpoint(toy):
    done = run("verify", toy)
    assert done.returncode == 0, done.stderr
    assert "sound tilequant checkpoint" in done.stdout
    assert "14 quantized linears" in done.stdout and "default 3.0" in done.stdout


def broken(toy, target, kind):
    if kind == "no folder":
        return target
    shutil.copytree(toy, target)
    config = json.loads((target / "config.json").read_text())
    if kind == "no config":
        (target / "config.json").unlink()
        return target
    if kind == "foreign method":
        config["quantization_config"]["quant_method"] = "gptq"
    if kind == "not quantized":
        del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    if kind == "missing tensor":
        tensors = load_file(target / "model.safetensors")
        del tensors["model.layers.1.self_attn.v_proj.weight_plane1"]
        save_file(tensors, target / "model.safetensors")
    if kind == "not finite":
        tensors = load_file(target / "model.safetensors")
        tensors["model.norm.weight"][3] = torch.nan
        save_file(tensors, target / "model.safetensors")
    if kind == "cut file":
        data = (target / "model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(data[: len(data) // 2])
    return target


FAULTS = {
    "no folder": "is not a folder",
    "no config": "no config.json",
    "foreign method": "quant_method is 'gptq', wanted 'tilequant'",
    "not quantized": "no quantization_config",
    "missing tensor": "model.layers.1.self_attn.v_proj.weight_plane1: missing",
    "not finite": "model.norm.weight is not finite",
    "cut file": "damaged",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_bad_checkpoints_are_refused_in_words(toy, tmp_path, capsys, kind):
    code, out, err = call(capsys, "verify", broken(toy, tmp_path / "x", kind))
    assert code == 1 and not out
    assert err.startswith("tilequant: ") and FAULTS[kind] in err and "Traceback" not in err


def test_no_traceback_in_a_process_either_unless_asked(tmp_path):
    done = run("verify", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr == f"tilequant: {tmp_path / 'nothing'} is not a folder\n"
    for arguments in (["--debug", "verify", tmp_path / "nothing"], ["verify", tmp_path / "nothing", "--debug"]):
        done = run(*arguments)
        assert done.returncode == 1 and "Traceback" in done.stderr


@needs_transformers
def test_evaluate_prints_a_table_and_writes_rows(toy, tmp_path, capsys):
    from vllm_tilequant import hf

    hf.load_dense(toy).save_pretrained(tmp_path / "dense")
    (tmp_path / "text").write_text(" ".join(f"w{3 + i * i % 250}" for i in range(300)))
    capsys.readouterr()
    common = ("evaluate", toy, "--reference", tmp_path / "dense", "--text", tmp_path / "text", "--window", 64)
    code, out, err = call(capsys, *common, "--tokens", 256, "--profile", "all", "--json", tmp_path / "rows.json")
    assert code == 0, err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [r["profile"] for r in rows] == ["off", "2.0", "3.0", "4.0", "full"]
    assert all(r["tokens"] == 256 and r["activation"] == "group64" for r in rows)
    for row in rows:
        assert f"{row['loaded_bits']:.3f}" in out
    assert "5/5" in err or "left" in err
    code, out, err = call(capsys, *common, "--tokens", 256, "--profile", "all", "--json", "-")
    assert code == 0 and [r["kl_milli"] for r in json.loads(out)] == [r["kl_milli"] for r in rows], err


@needs_transformers
@pytest.mark.parametrize(
    "changes,error",
    [
        ({"--profile": "9"}, "unknown profile '9'"),
        ({"--activation": "int2"}, "activation is 'int2'"),
        ({"--text": "/nothing/here"}, "No such file"),
        ({"--window": 4096}, "wanted tokens >= window"),
        ({"--reference": "/nothing/here"}, "/nothing/here"),
    ],
)
def test_evaluate_refuses_in_words(toy, tmp_path, capsys, changes, error):
    (tmp_path / "text").write_text(" ".join(f"w{3 + i}" for i in range(200)))
    options = {"--reference": toy, "--text": tmp_path / "text", "--tokens": 128, "--window": 64} | changes
    code, _, err = call(capsys, "evaluate", toy, *(x for pair in options.items() for x in pair))
    assert code == 1
    assert error in err and "Traceback" not in err


@needs_transformers
def test_a_tilequant_folder_is_no_reference(toy, tmp_path, capsys):
    (tmp_path / "text").write_text(" ".join(f"w{3 + i}" for i in range(200)))
    code, _, err = call(
        capsys, "evaluate", toy, "--reference", toy, "--text", tmp_path / "text", "--tokens", 128, "--window", 64
    )
    assert code == 1 and "is a tilequant checkpoint: the reference is the source model" in err


@pytest.mark.parametrize("verb", [None, *cli.VERBS])
def test_help_says_what_the_exit_codes_mean(verb, tilequant):
    code, out, err = tilequant(*([verb] if verb else []), "--help")
    assert code == 0, err
    assert "3 an extra is not installed" in " ".join(out.replace("\u2502", " ").split())
    assert verb is None or "--json" in out


def test_help_leaves_the_ends_of_lines_to_the_terminal():
    assert cli._unwrapped("One\n    two.\n\n    Three\n    four.\n    ") == "One two.\n\nThree four."
