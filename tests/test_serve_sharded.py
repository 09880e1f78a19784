"""Sharded state: what vLLM's own saver gets of our layers, what its loader brings back, and what is refused.

Engines that save and start again from it are in test_serve_features.py.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch
import vllm.config
import vllm.distributed
from safetensors.torch import load_file, save_file
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from layers import Toy, build, feed, on_rank, one_rank, prepare_for_kernels, quant_config, vllm_settings  # noqa: F401 - one_rank
from toy import write_toy
from vllm_tilequant import linear, register
from vllm_tilequant import schema as s
from vllm_tilequant import state as saving
from vllm_tilequant.checkpoint import sharded
from vllm_tilequant.checkpoint.files import CheckpointError
from vllm_tilequant.kernels import layout

pytestmark = pytest.mark.serve

#: In the order of the toy's kinds of maps: all of `down_proj` has 4 bits, so that it has no extension.
SHAPES = {
    "a.q_proj": (384, 192), "a.k_proj": (64, 192), "a.v_proj": (64, 192), "a.o_proj": (192, 384),
    "a.gate_proj": (192, 192), "a.down_proj": (192, 192), "a.up_proj": (192, 192), "lm_head": (384, 192),
}  # fmt: skip
SHARDS = {
    "a.qkv_proj": {"a.q_proj": "q", "a.k_proj": "k", "a.v_proj": "v"},
    "a.o_proj": {"a.o_proj": None},
    "a.gate_up_proj": {"a.gate_proj": 0, "a.up_proj": 1},
    "a.down_proj": {"a.down_proj": None},
    "lm_head": {"lm_head": None},
}
GROUPS = {"a.q_proj": "qkv", "a.k_proj": "qkv", "a.v_proj": "qkv", "a.gate_proj": "mlp", "a.up_proj": "mlp"}


@pytest.fixture
def toy():
    """Biases, a rotated input, smoothed inputs (of which those of `down_proj` are ones), a quantized head."""
    made = Toy(SHAPES, bias=("a.q_proj", "a.k_proj", "a.v_proj"), ignore=())
    made.config["required_features"] = ["input_transform"]
    for name, module in made.config["modules"].items():
        module["input_group"] = GROUPS.get(name, name)
    made.config["modules"]["a.o_proj"]["input_transform"] = 1
    for name in ("a.gate_proj", "a.up_proj", "a.down_proj"):
        made.config["modules"][name]["smoothing"] = True
        ones = torch.full((192,), s.SMOOTHING_ONE, dtype=torch.uint8)
        made.tensors[name][s.SMOOTHING] = ones if "down" in name else torch.arange(192, dtype=torch.uint8)
    return made


def make_model(toy, source=None):
    """The toy's layers under their names, as a model has them. source: the folder that vLLM was started with."""
    config = quant_config(toy)
    config.source = None if source is None else str(source)
    model, options = torch.nn.Module(), dict(quant_config=config)
    model.a = torch.nn.Module()
    model.a.qkv_proj = build(QKVParallelLinear, toy, 192, 64, 6, 1, prefix="a.qkv_proj", bias=True, **options)
    model.a.o_proj = build(RowParallelLinear, toy, 384, 192, prefix="a.o_proj", **options)
    model.a.gate_up_proj = build(MergedColumnParallelLinear, toy, 192, [192, 192], prefix="a.gate_up_proj", **options)
    model.a.down_proj = build(RowParallelLinear, toy, 192, 192, prefix="a.down_proj", **options)
    model.lm_head = ParallelLMHead(384, 192, params_dtype=torch.float32, prefix="lm_head", **options)
    return model


def loaded(toy, process=True):
    model = make_model(toy)
    for name, shards in SHARDS.items():
        feed(model.get_submodule(name), toy, shards, process=process)
    return model


def set_rank(monkeypatch, rank, size):
    """For layers and for vLLM's saver and loader, which ask for groups."""
    on_rank(monkeypatch, rank, size)
    group = SimpleNamespace(world_size=size, rank_in_group=rank)
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: group)
    monkeypatch.setattr(vllm.distributed, "get_pp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr(vllm.distributed, "get_pipeline_model_parallel_rank", lambda: 0, raising=False)  # newer releases


def save(monkeypatch, toy, folder, size=1, **options):
    folder.mkdir(exist_ok=True)
    for rank in range(size):
        set_rank(monkeypatch, rank, size)
        ShardedStateLoader.save_model(loaded(toy), str(folder), **options)
    return folder


def restore(toy, folder, **loader):
    """What vLLM does with `--load-format sharded_state`, on the rank that is set."""
    with vllm_settings(load_format="sharded_state", loader=loader):
        model = make_model(toy, folder)
        given = LoadConfig(load_format="sharded_state", model_loader_extra_config=loader)
        ShardedStateLoader(given).load_weights(model, SimpleNamespace(model=str(folder), model_weights=None))
    for name in SHARDS:
        layer = model.get_submodule(name)
        layer.quant_method.process_weights_after_loading(layer)
    return model


def everything(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def change(folder, edit, name="model-rank-0-part-0.safetensors"):
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)


@pytest.mark.parametrize(
    "size, options",
    [(1, {}), (3, {}), (1, {"max_size": 40_000}), (3, {"pattern": "mine-{part}-of-{rank}.safetensors"})],
    ids=["one rank", "three ranks", "parts", "other names"],
)
@pytest.mark.parametrize("kernels", [False, True], ids=["portable", "kernels"])
def test_every_rank_gets_back_what_it_served(monkeypatch, tmp_path, toy, size, options, kernels):
    """In the forms of either device; making those of a GPU needs none."""
    if kernels:
        monkeypatch.setattr(linear, "prepare", prepare_for_kernels)
    folder = save(monkeypatch, toy, tmp_path / "state", size, **options)
    pattern = options.get("pattern", sharded.ONE_STAGE)
    files = sharded.saved_files(folder, pattern)
    sharded.judge(folder, files)
    assert len(files) == len(list(folder.iterdir())) and (len(files) > size) == ("max_size" in options)
    for rank in range(size):
        set_rank(monkeypatch, rank, size)
        stored = {n: t for f in files if f.tp == rank for n, t in load_file(folder / f.name).items()}
        raw = loaded(toy, process=False)
        for name in SHARDS:  # the format's own tensors, of this rank
            found = raw.get_submodule(name).tilequant_loading.finish()
            wanted = layout.to_tensors(found.weight, found.thresholds, found.smoothing)
            for suffix, tensor in wanted.items():
                assert torch.equal(stored.pop(f"{name}.{suffix}", tensor[:0]), tensor), f"{name}.{suffix}"
        assert set(stored) == {"a.qkv_proj.bias"}
        served, again = everything(loaded(toy)), everything(restore(toy, folder, **options if "pattern" in options else {}))
        assert served.keys() == again.keys() and ("a.o_proj.graded_meta" in served) == kernels
        for name, tensor in served.items():
            assert torch.equal(tensor, again[name]), name


def test_only_the_state_of_a_whole_loaded_model_is_packed_again(toy):
    """vLLM's offloading computes with state dicts of single layers; its loaders read that of a model before it is loaded."""
    before = make_model(toy).state_dict()
    assert {n.removeprefix("a.down_proj.") for n in before if n.startswith("a.down_proj.")} == {*s.TENSORS, s.SMOOTHING}
    model = loaded(toy)
    part = model.a.state_dict()
    assert part["down_proj.weight_packed"].data_ptr() == model.a.down_proj.weight_packed.data_ptr()
    assert set(part) == {n.removeprefix("a.") for n, _ in model.named_parameters() if n.startswith("a.")}
    whole = model.state_dict()
    assert not any(n.endswith("weight_packed") for n in whole) and all(t.device.type == "cpu" for t in whole.values())
    assert "a.down_proj.weight_plane0" in whole and whole["a.down_proj.weight_extension"].numel() == 0
    adapted = torch.nn.Module()
    adapted.a = torch.nn.Module()
    adapted.a.down_proj = torch.nn.Module()
    adapted.a.down_proj.base_layer = model.a.down_proj
    with pytest.raises(NotImplementedError, match="a.down_proj inside an engine with --enable-lora"):
        adapted.state_dict()


@pytest.mark.parametrize("saved, started", [(1, 3), (3, 1)])
def test_another_parallel_size_is_refused_by_name(monkeypatch, tmp_path, toy, saved, started):
    folder = save(monkeypatch, toy, tmp_path / "state", saved)
    set_rank(monkeypatch, 0, started)
    with pytest.raises(ValueError, match=rf"tensor parallel size {started}, .*holds files of tensor parallel size {saved}\. "):
        restore(toy, folder)
    for path in sorted(folder.iterdir())[1:]:
        path.unlink()
    for rank in range(1, started):  # as many files as ranks, so that only their shapes tell
        shutil.copy(folder / "model-rank-0-part-0.safetensors", folder / f"model-rank-{rank}-part-0.safetensors")
    n = {1: 32, 3: 16}
    wrong = rf"a\.qkv_proj\.weight_plane0: I32 \[192, {n[saved]}\], this rank wants I32 \[192, {n[started]}\]"
    with pytest.raises(ValueError, match=rf"another parallel size saved it.*\n  {wrong}\n  a\.qkv_proj\.weight_plane1"):
        restore(toy, folder)


def test_a_stage_takes_its_own_files(monkeypatch, tmp_path, toy):
    """Of the second of two stages; vLLM names the files of stages otherwise."""
    folder = save(monkeypatch, toy, tmp_path / "state")
    only = folder / "model-rank-0-part-0.safetensors"
    shutil.copy(only, folder / "model-pp-1-tp-0-part-0.safetensors")
    save_file({"x": torch.ones(1)}, folder / "model-pp-0-tp-0-part-0.safetensors")
    only.unlink()
    with vllm_settings(load_format="sharded_state"):
        with pytest.raises(ValueError, match="pipeline parallel size 1 .* tensor parallel size 1, pipeline parallel size 2"):
            make_model(toy, folder)
        vllm.config.get_current_vllm_config().parallel_config.pipeline_parallel_size = 2
        for stage in (1, 0):
            monkeypatch.setattr(saving, "get_pp_group", lambda stage=stage: SimpleNamespace(rank_in_group=stage))
            if stage:
                make_model(toy, folder)
                continue
            with pytest.raises(
                ValueError, match=r"pp-0-tp-0-part-0.* is not what this rank.*\n  a\.qkv_proj\.weight_plane0: miss"
            ):
                make_model(toy, folder)


def test_tensors_that_are_missing_or_of_another_form_are_named(monkeypatch, tmp_path, toy):
    folder = save(monkeypatch, toy, tmp_path / "state")

    def edit(tensors):
        del tensors["a.qkv_proj.thresholds"]
        tensors["a.qkv_proj.weight_tile_scale"] = tensors["a.qkv_proj.weight_tile_scale"].half()
        tensors["a.qkv_proj.weight_extension"] = tensors["a.qkv_proj.weight_extension"].view(-1)

    change(folder, edit)
    with pytest.raises(ValueError) as refused:
        restore(toy, folder)
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(": ")[0].strip() for line in lines] == [
        f"a.qkv_proj.{suffix}" for suffix in ("weight_extension", "weight_tile_scale", "thresholds")
    ]


def test_values_are_judged_as_a_checkpoint_s(monkeypatch, tmp_path, toy):
    """All faults of a layer in one message; a map that is legal but not the promised one as well."""
    folder = save(monkeypatch, toy, tmp_path / "state")
    sound = load_file(folder / "model-rank-0-part-0.safetensors")

    def refused(**values):
        def edit(tensors):
            tensors |= {name: tensor.clone() for name, tensor in sound.items()}
            for suffix, (layer, where, value) in values.items():
                tensors[f"{layer}.{suffix}"][where] = value

        change(folder, edit)
        with pytest.raises(ValueError) as error:
            restore(toy, folder)
        return str(error.value)

    qkv = "a.qkv_proj"
    said = refused(
        weight_tile_scale=(qkv, (0, 0), -1.0),
        output_transform=(qkv, (1, 0), 9),
        thresholds=(qkv, (0, 0), 5.0),
        weight_tile_bits=(qkv, (0, 0), 5),
        bias=(qkv, 3, float("inf")),
    )
    assert said.startswith(f"{folder}/model-rank-0-part-0.safetensors is no sound sharded state:")
    for fault in (
        "a.q_proj.weight_tile_bits holds [5], wanted (2, 4, 6, 8)",
        f"{qkv}.weight_tile_scale holds 1 entries that are not finite and > 0",
        f"{qkv}.output_transform holds 9, the checkpoint has 3 transforms",
        f"{qkv}.thresholds are not finite and ascending",
        f"{qkv}.bias is not finite",
    ):
        assert f"\n  {fault}" in said, said
    bits = sound["a.o_proj.weight_tile_bits"]  # all 8
    assert "a.o_proj.weight_tile_bits has tiles" in (said := refused(weight_tile_bits=("a.o_proj", (0, 0), 6)))
    assert f"a.o_proj.weight_extension has {2 * bits.numel()} rows, its map wants {2 * bits.numel() - 1}" in said
    v = sound["a.qkv_proj.weight_tile_bits"][7:]
    kt = int((v == 2).nonzero()[0, 1])
    said = refused(weight_plane1=(qkv, (64 * kt, 28), 1))
    assert said.splitlines()[1:] == ["  a.v_proj.weight_plane1 is not empty under 2-bit tiles"]


def test_a_rank_may_hold_no_more_wide_tiles_than_there_are(monkeypatch, tmp_path, toy):
    folder = save(monkeypatch, toy, tmp_path / "state", 3)
    set_rank(monkeypatch, 2, 3)
    change(folder, lambda t: t["a.down_proj.weight_tile_bits"].fill_(2), "model-rank-2-part-0.safetensors")
    with pytest.raises(ValueError, match=r"a\.down_proj\.weight_tile_bits has tiles \{2: 3\} in a part of"):
        restore(toy, folder)


def test_a_state_with_another_load_format_is_refused_with_the_right_one(monkeypatch, tmp_path, toy):
    folder = save(monkeypatch, toy, tmp_path / "state", 3)
    with pytest.raises(NotImplementedError, match="sharded state of an engine of tensor parallel size 3.*format sharded_state"):
        make_model(toy, folder)
    with vllm_settings(load_format="dummy"):
        make_model(toy, folder)
    named = save(monkeypatch, toy, tmp_path / "named", pattern="x{part}.safetensors")
    with pytest.raises(NotImplementedError, match="neither model.safetensors nor .*pattern of its names"):
        make_model(toy, named)
    change(named, lambda t: t["a.qkv_proj.bias"].fill_(torch.nan), "x0.safetensors")
    with (
        vllm_settings(load_format="sharded_state", loader={"pattern": "x{part}.safetensors"}),
        pytest.raises(CheckpointError, match="x0.safetensors: a.qkv_proj.bias is not finite"),
    ):
        make_model(toy, named)
    with (
        vllm_settings(load_format="sharded_state", loader={"pattern": "{rank}-{colour}.safetensors"}),
        pytest.raises(ValueError, match=r"has fields \['colour'\]; legal ones are"),
    ):
        make_model(toy, named)


def test_an_ordinary_checkpoint_is_no_sharded_state(tmp_path, toy):
    folder = write_toy(tmp_path / "toy", layers=1)
    with (
        vllm_settings(load_format="sharded_state"),
        pytest.raises(ValueError, match="which holds no saved state.*a checkpoint is served without this option"),
    ):
        make_model(toy, folder)
    assert make_model(toy, folder) is not None


def start(folder):
    """The part of vLLM's start that reads a folder in the server's first process, before it knows a load format."""
    register()
    model = ModelConfig(model=str(folder), quantization="tilequant", dtype="bfloat16")
    return VllmConfig.get_quantization_config(model, LoadConfig())


@pytest.fixture
def state(tmp_path):
    """Files of two ranks in two parts each beside a config; an index copied along names files that are not there."""
    folder = write_toy(tmp_path / "state", layers=1)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')
    for rank in range(2):
        for part in range(2):
            save_file({f"x{part}": torch.ones(3)}, folder / f"model-rank-{rank}-part-{part}.safetensors")
    return folder


def test_the_first_process_takes_a_complete_state(state):
    assert start(state).source == str(state)
    stages = [path.rename(state / path.name.replace("rank", "pp-0-tp")) for path in state.glob("model-rank-*")]
    for path in stages:
        shutil.copy(path, state / path.name.replace("pp-0", "pp-1"))
    assert sharded.sizes(sharded.default_files(state)) == "tensor parallel size 2, pipeline parallel size 2"
    start(state)
    for path in state.glob("model-pp-*"):  # names of the user's own: only the rank knows of a pattern
        path.rename(state / path.name.replace("model", "mine"))
    start(state)


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda f: [p.unlink() for p in f.glob("*-rank-0-*")], "no file of rank 0"),
        (
            lambda f: shutil.copy(f / "model-rank-1-part-0.safetensors", f / f"model-rank-{10**15}-part-0.safetensors"),
            "no file of rank 2\n.*no file of rank 13$",
        ),
        (
            lambda f: (f / "model-rank-1-part-0.safetensors").rename(f / "model-rank-01-part-0.safetensors"),
            "model-rank-01-part-0.safetensors: no part of the saved state",
        ),
        (lambda f: (f / "model-rank-1-part-0.safetensors").unlink(), "rank 1 has parts 1, wanted 0"),
        (lambda f: shutil.copy(f / "model-rank-1-part-0.safetensors", f / "model-rank-1-part-2.safetensors"), "left behind"),
        (lambda f: (f / "model-rank-1-part-1.safetensors").write_bytes(b"no"), "is damaged or not a safetensors file"),
        (lambda f: save_file({"x1": torch.tensor([torch.nan])}, f / "model-rank-1-part-1.safetensors"), "x1 is not finite"),
        (lambda f: save_file({"x": torch.ones(1)}, f / "model.safetensors"), "model.safetensors: no part of the saved state"),
        (lambda f: (f / "x.bin").touch(), "may be pickles"),
    ],
    ids=["rank", "far rank", "rank twice", "part", "twice", "damaged", "not finite", "checkpoint beside", "pickle"],
)
def test_the_first_process_names_what_is_wrong(state, change, fault):
    change(state)
    with pytest.raises(CheckpointError, match=f"(?s){fault}"):
        start(state)
