"""What `tilequant convert` writes for stock vLLM: a real server on it answers as our dense model."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import PROMPTS, one_thread, server  # noqa: F401 - a fixture among them

from toy import write_toy
from vllm_tilequant import schema as s
from vllm_tilequant.checkpoint.compressed import Scheme, to_compressed
from vllm_tilequant.hf import load_dense

pytestmark = pytest.mark.serve


#: Root mean square of the differences, relative to how log-probabilities differ among tokens. Between bfloat16 and float32 in
#: transformers it is 0.012, with one linear wrong 1.0.
BOUND = 0.02


def test_w4a16_of_unrotated_tiles_is_our_dense_model(tmp_path):
    """In bfloat16, the one type that vLLM's CPU kernel for it has; `test_convert.py` shows equality in float32."""
    folder = write_toy(tmp_path / "toy", kind="all4")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(s.OUTPUT_TRANSFORM):
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    to_compressed(folder, tmp_path / "w4a16", Scheme.w4a16, torch.bfloat16, requantize=False)
    ids = PROMPTS[0]
    with torch.no_grad():
        logprobs = load_dense(tmp_path / "toy")(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    with server(tmp_path / "w4a16", tmp_path / "log", "--enforce-eager", "--dtype", "bfloat16") as client:
        answer = client.completions.create(
            model=str(tmp_path / "w4a16"), prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
        )
    told = answer.choices[0].model_extra["prompt_logprobs"][1:]
    got = torch.tensor([told[i][str(token)]["logprob"] for i, token in enumerate(ids[1:])])
    assert (got - wanted).square().mean().sqrt() / wanted.std() < BOUND
    assert "compressed-tensors" in (tmp_path / "log").read_text()
