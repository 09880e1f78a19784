"""vLLM's own layers over made-up checkpoints, on any rank of any size, without a process group or an engine."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
import vllm.distributed
import vllm.model_executor.layers.linear as vllm_linear
import vllm.model_executor.layers.vocab_parallel_embedding as vllm_head
import vllm.model_executor.parameter as vllm_parameter
from vllm.config import VllmConfig, set_current_vllm_config

from cases import THRESHOLDS, TRANSFORMS, make_case, make_map
from vllm_tilequant import schema as s
from vllm_tilequant import state
from vllm_tilequant.config import TileQuantConfig
from vllm_tilequant.kernels import decode_weight, layout, prefill_int8
from vllm_tilequant.kernels.dispatch import LinearWeight

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PROFILES = torch.tensor([THRESHOLDS["graded"], [0.1, 0.2, 0.3, 0.4]])
KINDS = ("mixed48", "all4", "mixed2468", "all8")


class Toy:
    """Some quantized modules: name -> tensors, and the config that announces them."""

    def __init__(self, shapes, bias=(), ignore=("lm_head",), make=make_case):
        self.cases, self.tensors, modules = {}, {}, {}
        for i, (name, (n, k)) in enumerate(shapes.items()):
            case = make(n, k, KINDS[i % len(KINDS)], seed=i)
            bits = case.weight.tile_bits
            self.cases[name] = case
            self.tensors[name] = layout.to_tensors(case.weight, PROFILES.clone())
            if name in bias:
                self.tensors[name][s.BIAS] = torch.randn(n, generator=torch.Generator().manual_seed(i))
            modules[name] = {
                "out_features": n,
                "in_features": k,
                "tile_counts": {int(b): int((bits == b).sum()) for b in bits.unique()},
                "bias": name in bias,
                "input_group": f"group {k}",
            }
        self.config = {
            "quant_method": "tilequant",
            "format_version": 1,
            "tile": 64,
            "max_bits": 8,
            "transforms": [{"kind": "identity"}] + [{"kind": "randomized_hadamard", "seed": i} for i in (1, 2)],
            "profiles": {"names": ["3.0", "2.0"], "default": "3.0"},
            "ignore": list(ignore),
            "modules": modules,
        }


def draw_case(n, k, kind, seed):
    """`make_case` without codes, for large shapes: random words are a legal weight."""
    g = torch.Generator().manual_seed(seed)
    bits = make_map(kind, n // 64, k // 64, g)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=g)

    weight = layout.PackedWeight(
        words(k, n // 16),
        words(k, n // 16),
        words(int(layout.extension_rows_per_tile(bits).sum()), s.WORDS_PER_TILE_PLANE),
        bits,
        torch.rand(bits.shape, generator=g) + 0.5,
        torch.randint(len(TRANSFORMS), (n // 64,), dtype=torch.uint8, generator=g),
    )
    return SimpleNamespace(weight=weight)


@contextlib.contextmanager
def vllm_settings(load_format="auto", loader=None, **tilequant):
    config = VllmConfig(additional_config={"tilequant": tilequant} if tilequant else {})
    config.load_config.load_format = load_format
    config.load_config.model_loader_extra_config = loader or {}
    with set_current_vllm_config(config):
        yield


def on_rank(monkeypatch, rank, size):
    """What the layers see of tensor parallelism, without any process group."""
    for module in (vllm_linear, vllm_head, vllm_parameter, state, vllm.distributed):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)


def quant_config(toy):
    config = TileQuantConfig.from_config(toy.config)
    config.packed_modules_mapping = PACKED
    return config


def prepare_for_kernels(w, transforms, dtype, activation, *, smoothing=None, int8_copy=False):
    """`dispatch.prepare` as a GPU does it, but for compiling: arranging needs none."""
    graded = decode_weight.prepare(w, transforms)
    copy = torch.zeros(w.out_features, w.in_features, dtype=torch.int8) if int8_copy else None
    return LinearWeight(prefill_int8.prepare(w, graded, smoothing=smoothing), graded, w.input_rotation, copy)


def build(kind, toy, *args, prefix, **kwargs):
    options = dict(bias=False, params_dtype=torch.float32, return_bias=False, quant_config=quant_config(toy))
    return kind(*args, prefix=prefix, **(options | kwargs))


def feed(layer, toy, shards, seed=0, skip=(), change=None, process=True):
    """Load every tensor of `shards` (module name -> vLLM's shard id) in an order of its own, as a model's loader would.

    process: with what vLLM does after loading; without it, `layer.tilequant_loading.finish()` tells what has arrived.
    """
    jobs = [(name, suffix, t, shard) for name, shard in shards.items() for suffix, t in toy.tensors[name].items()]
    random.Random(seed).shuffle(jobs)
    for name, suffix, tensor, shard in jobs:
        if (name, suffix) in skip:
            continue
        if change and change[0] == (name, suffix):
            tensor = change[1](tensor.clone())
        param = getattr(layer, suffix)
        arguments = (param, tensor) if shard is None else (param, tensor, shard)
        param.weight_loader(*arguments)
    if process:
        layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    on_rank(monkeypatch, 0, 1)
    with vllm_settings():
        yield
