"""A checkpoint named by a hub id is judged before a server starts as well, once its files are in the hub's cache."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from toy import write_toy
from vllm_tilequant.checkpoint.files import INDEX, SINGLE, CheckpointError
from vllm_tilequant.checkpoint.reader import Checkpoint

pytestmark = pytest.mark.serve


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """Folder of org/name at `main` in a hub cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return write_toy(repository / "snapshots" / ("0" * 40), layers=1, tokenizer=False)


def judge(folder, name):
    from vllm_tilequant.config import TileQuantConfig

    TileQuantConfig(Checkpoint.open(folder).schema).maybe_update_config(name, hf_config=None, revision=None)


def test_a_downloaded_checkpoint_is_judged_by_every_value(snapshot, tmp_path):
    sound = shutil.copytree(snapshot, tmp_path / "sound")
    judge(sound, "org/name")
    tensors = load_file(snapshot / SINGLE)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, snapshot / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.norm.weight is not finite"):
        judge(sound, "org/name")


@pytest.mark.parametrize("name", ["org/other", "s3://bucket/x", "a b", "x" * 200])
def test_what_is_not_there_is_left_to_vllm(snapshot, name):
    judge(snapshot, name)


def test_a_download_that_is_not_complete_is_left_to_vllm(snapshot, tmp_path):
    sound = shutil.copytree(snapshot, tmp_path / "sound")
    names = dict.fromkeys(load_file(snapshot / SINGLE), "model-00001-of-00002.safetensors")
    (snapshot / SINGLE).unlink()
    judge(sound, "org/name")
    (snapshot / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    judge(sound, "org/name")
    (snapshot / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "../x.safetensors")}))
    with pytest.raises(CheckpointError, match="names files outside the folder"):
        judge(sound, "org/name")
