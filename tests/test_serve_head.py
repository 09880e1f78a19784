"""A quantized output head in vLLM: whole, shared out among ranks, and where it may not be."""

import pytest
import torch
import vllm.model_executor.layers.vocab_parallel_embedding as vllm_head

from cases import make_rows
from layers import PROFILES, Toy, feed, on_rank, one_rank, quant_config  # noqa: F401 - one_rank
from tolerances import FLOAT32_RMS, relative_rms
from vllm_tilequant.kernels import layout, reference

pytestmark = pytest.mark.serve


def head(toy, vocabulary=384, hidden=128):
    return vllm_head.ParallelLMHead(
        vocabulary, hidden, params_dtype=torch.float32, quant_config=quant_config(toy), prefix="lm_head"
    )


@pytest.mark.parametrize("rank,size", [(0, 1), (0, 3), (2, 3)])
def test_logits_are_this_rank_s_share_of_the_reference(monkeypatch, rank, size):
    toy = Toy({"lm_head": (384, 128)}, ignore=())
    on_rank(monkeypatch, rank, size)
    layer = head(toy)
    feed(layer, toy, {"lm_head": None})
    case = toy.cases["lm_head"]
    outputs = (rank * 384 // size, (rank + 1) * 384 // size)
    part = layout.slice_weight(case.weight, outputs, (0, 128))
    matrices = case.matrices[outputs[0] // 64 : outputs[1] // 64]
    for rows in (1, 8, 20):  # as many as sequences are sampled
        x = make_rows(rows, 128)
        got = layer.quant_method.apply(layer, x, bias=None)
        if rows <= 8:
            want = reference.decode_bitplane_ref(x, part, matrices, PROFILES[0])
        else:
            want = reference.linear_ref(x, part, matrices, int8=True)
        assert got.shape == (rows, 384 // size) and relative_rms(got, want) <= FLOAT32_RMS


def test_a_head_of_other_sizes_is_refused_by_name():
    with pytest.raises(ValueError, match="lm_head have 384 outputs in quantization_config, 448 in the model"):
        head(Toy({"lm_head": (384, 128)}, ignore=()), vocabulary=448)


def test_a_dense_head_and_embeddings_are_vllm_s_own():
    toy = Toy({"a.down_proj": (128, 128)})
    assert isinstance(head(toy).quant_method, vllm_head.UnquantizedEmbeddingMethod)
    with pytest.raises(NotImplementedError, match="embed_tokens .* is quantized in this checkpoint"):
        vllm_head.VocabParallelEmbedding(
            384, 128, quant_config=quant_config(Toy({"embed_tokens": (384, 128)})), prefix="embed_tokens"
        )
