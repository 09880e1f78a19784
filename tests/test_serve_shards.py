"""What each rank of a parallel server holds, reads and computes: exactly its part, at the shapes of real models."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from cases import TRANSFORMS, make_rows
from layers import PROFILES, Toy, build, draw_case, feed, on_rank, one_rank  # noqa: F401 - one_rank
from tolerances import FLOAT32_RMS, relative_rms
from vllm_tilequant import schema as s
from vllm_tilequant.config import check_parallel
from vllm_tilequant.kernels import layout, reference
from vllm_tilequant.linear import _legal_tp_sizes

pytestmark = pytest.mark.serve

#: A layer of vLLM -> its members in the checkpoint, with the shard ids that vLLM gives them.
MEMBERS = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "o_proj": {"o_proj": None},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    "down_proj": {"down_proj": None},
}


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int = 64

    def of(self, linear):
        """(outputs, inputs)"""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": self.intermediate, "up_proj": self.intermediate}
        inputs = {"o_proj": q, "down_proj": self.intermediate}
        return outputs.get(linear, self.hidden), inputs.get(linear, self.hidden)

    def part(self, linear, rank, size):
        """The outputs and the inputs that a rank of `size` holds, as ranges."""
        n, k = self.of(linear)
        if linear in ("o_proj", "down_proj"):
            return (0, n), (rank * k // size, (rank + 1) * k // size)
        if linear in ("k_proj", "v_proj") and size > self.kv_heads:
            rank, size = rank * self.kv_heads // size, self.kv_heads
        return (rank * n // size, (rank + 1) * n // size), (0, k)

    def layer(self, name, toy):
        prefix = f"a.{name}"
        if name == "qkv_proj":
            return build(QKVParallelLinear, toy, self.hidden, self.head, self.heads, self.kv_heads, prefix=prefix)
        if name == "gate_up_proj":
            return build(MergedColumnParallelLinear, toy, self.hidden, [self.intermediate] * 2, prefix=prefix)
        n, k = self.of(name)
        return build(RowParallelLinear, toy, k, n, prefix=prefix)

    def modules(self, layers):
        """What config.json of a model of these sizes announces."""
        return {
            f"model.layers.{i}.{'self_attn' if linear in 'q_proj k_proj v_proj o_proj' else 'mlp'}.{linear}": SimpleNamespace(
                out_features=self.of(linear)[0], in_features=self.of(linear)[1]
            )
            for i in range(layers)
            for members in MEMBERS.values()
            for linear in members
        }

    def config(self):
        text = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        return SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: text))


LLAMA_8B = Shape(4096, 14336, 32, 8, 128)
SAMPLE = Shape(576, 1536, 9, 3)
NINE = Shape(576, 1152, 9, 3)  # made up: at nine ranks a query head each, three ranks to a KV head, two tiles of gate and up


@cache
def drawn(shape, layer):
    return Toy({f"a.{linear}": shape.of(linear) for linear in MEMBERS[layer]}, make=draw_case)


@pytest.mark.parametrize("layer", MEMBERS)
@pytest.mark.parametrize(
    "shape, size", [*((LLAMA_8B, size) for size in (2, 4, 8)), (SAMPLE, 3), (NINE, 3), (NINE, 9)], ids=lambda v: str(v)[:30]
)
def test_every_rank_holds_its_part(monkeypatch, shape, size, layer):
    """Members of different maps and sizes, and KV heads that several ranks hold; the packed weight is compared bit by bit."""
    toy = drawn(shape, layer)
    ranks = {0, size // 2, size - 1} if shape is LLAMA_8B else range(size)
    for rank in ranks:
        on_rank(monkeypatch, rank, size)
        module = shape.layer(layer, toy)
        feed(module, toy, {f"a.{linear}": shard for linear, shard in MEMBERS[layer].items()}, seed=rank, process=False)
        got = module.tilequant_loading.finish()
        want = layout.concat_outputs(
            [layout.slice_weight(toy.cases[f"a.{m}"].weight, *shape.part(m, rank, size)) for m in MEMBERS[layer]]
        )
        for field, value in vars(want).items():
            assert value is None or torch.equal(getattr(got.weight, field), value), f"rank {rank}: {field}"
        assert torch.equal(got.thresholds, PROFILES)
    if shape is LLAMA_8B and size == 8:
        drawn.cache_clear()  # some hundred megabytes


def parallel(**changes):
    settings = dict(tensor_parallel_size=1, data_parallel_size=1, is_moe_model=False, enable_expert_parallel=False)
    return SimpleNamespace(**settings | changes)


def test_sizes_of_the_sample_model():
    """9 query and 3 KV heads, 1536 inner features: only 1 and 3 fall on heads and tiles."""
    schema = SimpleNamespace(modules=SAMPLE.modules(30))
    for size in (1, 3):
        check_parallel(schema, SAMPLE.config(), parallel(tensor_parallel_size=size))
    with pytest.raises(ValueError, match="tensor parallel size 2 would cut tiles") as two:
        check_parallel(schema, SAMPLE.config(), parallel(tensor_parallel_size=2))
    assert str(two.value).splitlines()[1:] == [
        "  9 attention heads do not divide among 2 ranks",
        "  3 key-value heads neither divide among 2 ranks nor repeat evenly",
        "  model.layers.0-29.self_attn.q_proj: 576 outputs / 2 = 288, not a multiple of 64",
        "  model.layers.0-29.self_attn.k_proj: 192 outputs / 2 = 96, not a multiple of 64",
        "  model.layers.0-29.self_attn.v_proj: 192 outputs / 2 = 96, not a multiple of 64",
        "  model.layers.0-29.self_attn.o_proj: 576 inputs / 2 = 288, not a multiple of 64",
        "Legal tensor parallel sizes: [1, 3]. `tilequant inspect FOLDER --tp N` says so without a server.",
    ]
    with pytest.raises(ValueError) as nine:
        check_parallel(schema, SAMPLE.config(), parallel(tensor_parallel_size=9))
    assert "  model.layers.0-29.mlp.gate_proj: 1536 outputs / 9 = 170.667, not a multiple of 64" in str(nine.value)
    assert "self_attn" not in str(nine.value)  # a query head each, a KV head for every three: attention could be cut
    check_parallel(SimpleNamespace(modules=NINE.modules(2)), NINE.config(), parallel(tensor_parallel_size=9))


def test_each_layer_judges_as_the_rule_for_the_whole_model(monkeypatch):
    """The plugin's check of a single layer, which knows vLLM's own cut, against the one that only knows names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import legal_sizes

    for m in legal_sizes.MODELS:
        qkv = SimpleNamespace(total_num_heads=m.heads, total_num_kv_heads=m.kv_heads, head_size=m.head, v_head_size=m.head)
        gate_up = SimpleNamespace(output_sizes=[m.intermediate] * 2)
        sizes = [_legal_tp_sizes(qkv, None), _legal_tp_sizes(gate_up, None)]
        sizes += [_legal_tp_sizes(None, k) for k in (m.heads * m.head, m.intermediate)]
        assert m.legality(1).legal == sorted(set.intersection(*map(set, sizes))), m.name


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"data_parallel_size": 2, "is_moe_model": True}, "--data-parallel-size 2 on a mixture of experts"),
    ],
)
def test_settings_that_do_not_apply_are_refused_by_name(changes, option):
    with pytest.raises(NotImplementedError, match=option):
        check_parallel(SimpleNamespace(modules=SAMPLE.modules(1)), SAMPLE.config(), parallel(**changes))


def test_replicas_of_a_dense_model_are_not_refused():
    check_parallel(SimpleNamespace(modules=SAMPLE.modules(1)), SAMPLE.config(), parallel(data_parallel_size=2))


@pytest.mark.parametrize("size", [2, 3, 4, 6, 12])
def test_ranks_grade_their_inputs_as_a_single_one_would(monkeypatch, size):
    """A layer cut along its inputs: levels, INT8 codes and the integer sums of all tiles are those of the whole."""
    toy = Toy({"a.down_proj": (192, 768)})
    weight, x = toy.cases["a.down_proj"].weight, make_rows(3, 768)
    thresholds = PROFILES[0]
    levels, sums = reference.levels_ref(x, thresholds), reference.tile_sums_ref(x, weight, thresholds)
    codes, scales = reference.activation_int8_ref(x)
    got = {"levels": [], "codes": [], "scales": [], "sums": []}
    total = torch.zeros(3, 192)
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = build(RowParallelLinear, toy, 768, 192, prefix="a.down_proj")
        feed(layer, toy, {"a.down_proj": None}, process=False)
        loaded = layer.tilequant_loading.finish()
        part = x[:, rank * 768 // size : (rank + 1) * 768 // size]
        assert torch.equal(loaded.thresholds[0], thresholds)
        got["levels"].append(reference.levels_ref(part, loaded.thresholds[0]))
        got["sums"].append(reference.tile_sums_ref(part, loaded.weight, loaded.thresholds[0]))
        own_codes, own_scales = reference.activation_int8_ref(part)
        got["codes"].append(own_codes)
        got["scales"].append(own_scales)
        layer.quant_method.process_weights_after_loading(layer)
        total += layer.quant_method.apply(layer, part)  # what the all-reduce does
    for name, want in (("levels", levels), ("codes", codes), ("scales", scales), ("sums", sums)):
        assert torch.equal(torch.cat(got[name], 1), want), name
    want = reference.decode_bitplane_ref(x, weight, TRANSFORMS[weight.output_transform.long()], thresholds)
    assert relative_rms(total, want) <= FLOAT32_RMS  # only the order of float32 additions is another


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_layers_cut_along_outputs_compute_the_same_outputs(monkeypatch, rows):
    toy = Toy({"a.gate_proj": (384, 192), "a.up_proj": (384, 192)})
    x, parts = make_rows(rows, 192), {}
    for size in (1, 3):
        for rank in range(size):
            on_rank(monkeypatch, rank, size)
            layer = build(MergedColumnParallelLinear, toy, 192, [384, 384], prefix="a.gate_up_proj")
            feed(layer, toy, {"a.gate_proj": 0, "a.up_proj": 1})
            parts[size, rank] = layer.quant_method.apply(layer, x).chunk(2, 1)
    joined = torch.cat([parts[3, rank][i] for i in range(2) for rank in range(3)], 1)
    whole = torch.cat(parts[1, 0], 1)
    assert torch.equal(joined, whole) if rows <= 8 else relative_rms(joined, whole) <= FLOAT32_RMS


class Reads(TorchDispatchMode):
    """Bytes that operations take from a mapped file, and the largest tensor that any of them makes."""

    def __init__(self, path):
        super().__init__()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        self.ranges = [[int(a, 16) for a in line[0].split("-")] for line in lines if line[-1] == str(path)]
        self.nbytes, self.largest = Counter(), 0

    def mapped(self, t):
        return isinstance(t, torch.Tensor) and any(a <= t.data_ptr() < b for a, b in self.ranges)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not self.mapped(out):  # a view of the file reads nothing
            sources = [a for a in tree_leaves((args, kwargs)) if self.mapped(a)]
            taken = out.nbytes if func is torch.ops.aten.index.Tensor else sum(a.nbytes for a in sources)
            if sources:
                self.nbytes[func._schema.name] += taken
            if not any(isinstance(a, torch.Tensor) and a.data_ptr() == out.data_ptr() for a in tree_leaves(args)):
                self.largest = max(self.largest, out.nbytes)
        return out


@pytest.mark.parametrize("layer", ["gate_up_proj", "down_proj"])
def test_a_rank_reads_its_own_bytes_of_the_mapped_file(monkeypatch, tmp_path, layer):
    """What vLLM's loader hands over is a view of the file; only a rank's slices of planes and extension are copied from it."""
    shape, size = Shape(512, 1024, 8, 8), 4
    toy = drawn(shape, layer)
    path = tmp_path / "model.safetensors"
    save_file({f"{name}.{suffix}": t for name, tensors in toy.tensors.items() for suffix, t in tensors.items()}, path)
    stored = dict(safetensors_weights_iterator([str(path)], False))
    reads = Reads(path)
    assert reads.ranges and all(reads.mapped(t) for t in stored.values() if t.numel())
    for name, tensors in toy.tensors.items():
        toy.tensors[name] = {suffix: stored[f"{name}.{suffix}"] for suffix in tensors}
    on_rank(monkeypatch, 1, size)
    module = shape.layer(layer, toy)
    with reads:
        feed(module, toy, {f"a.{linear}": shard for linear, shard in MEMBERS[layer].items()}, process=False)
        got = module.tilequant_loading.finish().weight
    own = got.plane0.nbytes + got.plane1.nbytes + got.extension.nbytes
    large = (s.PLANE0, s.PLANE1, s.EXTENSION)
    small = sum(t.nbytes for tensors in toy.tensors.values() for suffix, t in tensors.items() if suffix not in large)
    whole = sum(t.nbytes for tensors in toy.tensors.values() for t in tensors.values())
    taken = sum(reads.nbytes.values())
    # Maps, scales, transform indices and thresholds are read whole, a few times: every value of theirs is checked.
    assert own <= taken <= own + 6 * small, reads.nbytes
    assert taken < whole / 3
    assert reads.largest <= max(got.extension.nbytes, got.plane0.nbytes)
    del stored, toy
    drawn.cache_clear()
