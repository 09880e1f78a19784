"""A checkpoint folder may come from anyone: what a stranger writes into it is refused in one sentence, or read as it says."""

import importlib.util
import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant.checkpoint.reader import Checkpoint, CheckpointError
from vllm_tilequant.checkpoint.verify import verify

Q = "model.layers.0.self_attn.q_proj"
F = "folded_input_diagonal"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write_toy(tmp_path / "toy", layers=1, tokenizer=False)


def refuse(folder, message):
    with pytest.raises(CheckpointError, match=message) as e:
        Checkpoint.open(folder)
    assert all(line.isprintable() for line in str(e.value).split("\n")) and len(str(e.value)) < 8000


def config_with(folder, text):
    """Replace the value of vocab_size by raw JSON text."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 256', f'"vocab_size": {text}', 1))


def rotate(quantization, names, index):
    quantization["required_features"] = ["input_transform"]
    for name in names:
        quantization["modules"][name]["input_transform"] = index


@pytest.mark.parametrize(
    "text,message",
    [
        ("[" * 100_000, "nests too deeply"),
        ("9" * 5000, "not JSON"),
        ("NaN", "NaN is no JSON number"),
        ('256, "vocab_size": 256', "'vocab_size' occurs twice"),
        ("-1", "vocab_size is -1, wanted an integer"),
        ("1e308", "vocab_size is 1e.308, wanted an integer"),
        (str(1 << 40), "vocab_size is 1099511627776, wanted an integer"),
        ('"256"', "vocab_size is '256', wanted an integer"),
        ("4096", "vocab_size and hidden_size say .4096, 128"),
        ('256, "num_hidden_layers": 900', "'num_hidden_layers' occurs twice"),
        ('256, "text_config": {"head_dim": -4}', "text_config.head_dim is -4"),
    ],
)
def test_numbers_and_json_of_the_config(folder, text, message):
    config_with(folder, text)
    refuse(folder, message)


def quantization(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda q: q.update(format_version=True), "format_version is True"),
        (
            lambda q: q.update(format_version=2, producer={"vllm-tilequant": "0.4.0"}),
            "reads 1: vllm-tilequant 0.4.0 wrote it and reads it",
        ),
        (lambda q: q.update(required_features=3), "required_features is 3"),
        (lambda q: q["modules"][Q].update(input_transform=1), "required_features lacks 'input_transform'"),
        (lambda q: rotate(q, [Q], 1), "modules with one input differ in input_transform"),
        (lambda q: rotate(q, q["modules"], 9), "input_transform beyond the 3 transforms"),
        (lambda q: q.update(folded_input_diagonal=[Q]), "required_features lacks 'folded_input_diagonal'"),
        (lambda q: q.update(folded_input_diagonal=["no"], required_features=[F]), "what is no input group: ..no"),
        (lambda q: q.update(folded_input_diagonal=True, required_features=[F]), "folded_input_diagonal: Input should be"),
        (lambda q: rotate(q, q["modules"], -1), "greater than or equal to 0"),
        (lambda q: rotate(q, q["modules"], True), "valid integer"),
        (lambda q: q.update(required_features=[{}]), "required_features is"),
        (lambda q: q["modules"][Q].update(out_features="128"), "out_features: Input should be a valid integer"),
        (lambda q: q["modules"][Q].update(out_features=1 << 50), "less than or equal to"),
        (lambda q: q["modules"][Q].update(tile_counts=[4]), "tile_counts"),
        (lambda q: q["modules"].update({"../x": q["modules"].pop(Q), "\x1b[2J": {}}), "modules"),
        (lambda q: q["modules"].update({"\ud800": {}}), "modules"),
        (lambda q: q["transforms"][1].update(seed=-1), "seed"),
        (lambda q: q["profiles"].update(names=["a b", "\n", "x"]), "profile names of 1 to 64 letters"),
        (lambda q: q.update(ignore=["re:("]), "no regular expression"),
        (lambda q: q.update(ignore=["re:(a+)+$"]), "repeats a group"),
        (lambda q: q.update(ignore=[r"re:(a+\\)+$"]), "repeats a group"),
        (lambda q: q.update(ignore=["re:.*.*.*.*x"]), "branches too often"),
        (lambda q: q.update(ignore=["re:" + "(.|.)" * 21 + "x"]), "branches too often"),
        (lambda q: q.update(ignore=["re:" + ".?" * 21 + "x"]), "branches too often"),
        (lambda q: q.update(modules=7), "modules: Input should be a valid dictionary"),
    ],
)
def test_types_and_bounds_of_the_quantization_config(folder, change, message):
    quantization(folder, change)
    refuse(folder, message)


def test_usual_patterns_are_fine(folder):
    usual = [
        r"re:.*lm_head.*",
        r"re:.*layers\.\d+\.(q|k|v)_proj.*",
        r"re:model\.layers\.(0|1|2|3|4|5)\..*",
        r"re:(?:visual|vision)\..+",
    ]
    quantization(folder, lambda q: q.update(ignore=usual))
    assert Checkpoint.open(folder).schema.ignore == usual


def test_layers_that_no_file_holds(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 900'))
    refuse(folder, "num_hidden_layers is 900, the files hold layers up to 0")


def test_pickles_and_other_weight_files_beside(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(folder, "may be pickles.*pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    refuse(folder, "do not belong to it: adapter_model.safetensors")


def test_links(folder, tmp_path):
    """Out of the folder: refused. Within it, and as in Hugging Face's cache: read."""
    outside = tmp_path / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)
    refuse(folder, "is a link that leads outside the folder")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, source in (("config.json", folder / "config.json"), (WEIGHTS, outside)):
        (blobs / f"hash-{name}").write_bytes(source.read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    assert verify(snapshot).modules == 7


def test_a_pipe_is_not_waited_for(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    refuse(folder, "no regular file")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 3}, {"a": ["x"]}, {"a": ".safetensors"}, {"a": "x\n.safetensors"}])
def test_an_index_of_other_types(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refuse(folder, "index")


def test_metadata_of_an_index(folder):
    """transformers asks for its fields, whatever it is."""
    weight_map = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"metadata": 3, "weight_map": weight_map}))
    refuse(folder, "its metadata is no object")


def header_with(folder, change):
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = change(json.loads(raw[8 : 8 + length]))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda h: h | {"model.norm.weight": 3}, "wanted an object with dtype"),
        (lambda h: h | {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}, "dtype 'F99' is not known"),
        (lambda h: h | {"x": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}}, "offsets span 4"),
        (lambda h: h | {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "no list of sizes"),
        (lambda h: h | {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "overlap"),
        (lambda h: {n: v for n, v in h.items() if n != "model.norm.weight"}, "gap|describes"),
        (lambda h: h | {"__metadata__": {"format": 7}}, "metadata"),
        (lambda h: json.dumps(h).encode()[:-1] + b', "model.norm.weight": 1}', "'model.norm.weight' occurs twice"),
        (lambda h: b"[]", "no JSON object"),
    ],
)
def test_headers_are_judged_before_anything_is_read(folder, change, message):
    header_with(folder, change)
    refuse(folder, message)


def test_a_header_longer_than_its_file(folder):
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])
    refuse(folder, "header claims 1152921504606846976 bytes")


def test_values_are_judged_wherever_a_module_is_read(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{Q}.weight_tile_scale"][0, 0] = torch.nan
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, folder / WEIGHTS)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="weight_tile_scale holds 1 entries"):
        checkpoint.module(Q)
    with pytest.raises(CheckpointError, match="model.norm.weight is not finite"):
        checkpoint.dense("model.norm.weight")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


def places(data, at=()):
    """Every path into a JSON value, containers included."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield (*at, key)
        yield from places(data[key], (*at, key))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="compares logits of a transformers model")
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.booleans(), place=st.integers(0, 10**6), value=JSON)
def test_any_json_anywhere_is_refused_or_read_as_it_says(tmp_path_factory, header, place, value):
    """One value of config.json or of the safetensors header (its metadata too) replaced by whatever hypothesis thinks of."""
    import fuzz_checkpoint

    folder = write_toy(tmp_path_factory.mktemp("any") / "toy", kind="mixed48", **fuzz_checkpoint.SHAPE)
    raw, data = (folder / WEIGHTS).read_bytes(), b""
    length = struct.unpack("<Q", raw[:8])[0]
    text, data = (raw[8 : 8 + length], raw[8 + length :]) if header else ((folder / "config.json").read_bytes(), b"")
    changed = json.loads(text)
    *path, last = (every := list(places(changed)))[place % len(every)]
    inner = changed
    for key in path:
        inner = inner[key]
    inner[last] = value
    new = json.dumps(changed).encode()
    if header:
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data)
    else:
        (folder / "config.json").write_bytes(new)
    assert fuzz_checkpoint.judge(folder, place) in ("refused", "equal")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="compares logits of a transformers model")
def test_a_short_fuzz():
    """300 mutants; docs/fuzzing.md has the long run."""
    import fuzz_checkpoint

    counts, failures = fuzz_checkpoint.run(300, seed=1)
    assert not failures, failures
    total = sum(counts.values(), fuzz_checkpoint.Counter())
    assert total["refused"] > 100 and total["equal"] > 50
