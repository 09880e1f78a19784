"""What users switch on, through vLLM's engine in float32 on the CPU: batches, chunks, caches, drafts, adapters, dtypes.

All engines run in one process of their own (engines.py), once for the whole file.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import (
    ENVIRONMENT,
    LOGPROB_BOUNDS,
    PARALLEL_TOY,
    PROMPTS,
    greedy,
    one_thread,  # noqa: F401 - a fixture
    reference_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from cases import make_map
from toy import TRANSFORMS, quantize_tensor, write_other, write_tokenizer, write_toy
from vllm_tilequant import schema as s
from vllm_tilequant.hf import load_dense
from vllm_tilequant.kernels import layout

pytestmark = pytest.mark.serve

OFF = {"additional_config": {"tilequant": {"profile": "off", "activation": "none"}}}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
SHARDED = {"load_format": "sharded_state"}
LONG = 24


def drafted_by(folder):
    return {"speculative_config": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}}


#: Prompts beyond the graded limit, so that a step that shares out its rows differently still runs them at stored precision.
LONGER = PROMPTS[:3]
ADAPTED = {"self_attn.q_proj": 8, "self_attn.o_proj": 8, "mlp.up_proj": 8, "mlp.down_proj": 8}


def write_adapter(folder, model):
    """A LoRA adapter of rank 8, twice as strong as its matrices; returns what it adds to each weight."""
    folder.mkdir()
    g, tensors, added = torch.Generator().manual_seed(5), {}, {}
    for name, linear in model.named_modules():
        if name.endswith(tuple(ADAPTED)):
            n, k = linear.weight.shape
            a, b = torch.randn(8, k, generator=g) * k**-0.5, torch.randn(n, 8, generator=g) * 0.1
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            added[name] = 2 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"}
    config |= {"target_modules": [name.rpartition(".")[2] for name in ADAPTED], "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


#: Architecture -> profiles that it is asked with.
FAMILIES = {
    "qwen2": ("off",),
    "qwen3": ("off", "graded"),
    "mistral": ("off",),
    "gemma3_text": ("off",),
    "phi3": ("off", "graded"),
}


def write_family(folder, family):
    """A small random model of another architecture, every linear quantized by rounding, maps and transforms at random."""
    torch.manual_seed(3)
    sizes = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(head_dim=64, vocab_size=256, max_position_embeddings=512, initializer_range=0.08)
    special = dict(pad_token_id=2, bos_token_id=1, eos_token_id=2)
    window = {"sliding_window": 16} if family in ("mistral", "gemma3_text") else {}
    if family in ("qwen2", "phi3"):  # their heads have the size that hidden_size gives them
        sizes |= dict(num_attention_heads=2, num_key_value_heads=1)
    if family == "phi3":
        sizes |= dict(original_max_position_embeddings=512)
    config = AutoConfig.for_model(family, **sizes, **special, **window)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    base, modules = torch.tensor([[0.05, 0.15, 0.4, 1.0]]), {}
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        n, k = linear.weight.shape
        bits = make_map("mixed48", n // 64, k // 64, g)
        index = torch.randint(len(TRANSFORMS), (n // 64,), dtype=torch.uint8, generator=g)
        own = layout.to_tensors(quantize_tensor(linear.weight.detach().float(), bits, index), base.clone())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": t.contiguous() for suffix, t in own.items()}
        counts = {b: int((bits == b).sum()) for b in s.TILE_BITS if int((bits == b).sum())}
        group = name.rpartition(".")[0] if name.endswith(("q_proj", "k_proj", "v_proj")) else name
        group = name.rpartition(".")[0] if name.endswith(("gate_proj", "up_proj")) else group
        modules[name] = s.Module(
            out_features=n, in_features=k, tile_counts=counts, bias=linear.bias is not None, input_group=group
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = s.QuantizationSchema(
        quant_method=s.QUANT_METHOD,
        format_version=s.FORMAT_VERSION,
        tile=s.TILE,
        max_bits=8,
        transforms=TRANSFORMS,
        profiles=s.Profiles(names=["4.0"], default="4.0"),
        ignore=["lm_head"],
        modules=modules,
    )
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization.dump()}
    (folder / "config.json").write_text(json.dumps(written))
    write_tokenizer(folder, 256)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("features") / "toy", **PARALLEL_TOY)


@pytest.fixture(scope="module")
def adapter(folder):
    path = folder.with_name("adapter")
    return path, write_adapter(path, load_dense(folder))


@pytest.fixture(scope="module")
def folded(folder):
    """The toy, said to have a folded input diagonal."""
    out = shutil.copytree(folder, folder.with_name("folded"))
    config = json.loads((out / "config.json").read_text())
    ours = config["quantization_config"]
    ours["required_features"].append(s.FOLDED_INPUT_DIAGONAL)
    ours["folded_input_diagonal"] = [next(iter(ours["modules"].values()))["input_group"]]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def other(folder):
    return write_other(folder, folder.with_name("other"))


@pytest.fixture(scope="module")
def stateful(tmp_path_factory):
    """A checkpoint to be saved as a sharded state, and the folder that becomes it.

    Biases, rotated inputs, a quantized head, and a diagonal said to be folded.
    """
    folder = write_toy(tmp_path_factory.mktemp("state") / "toy", **PARALLEL_TOY, head=True)
    config = json.loads((folder / "config.json").read_text())
    ours = config["quantization_config"]
    ours["required_features"].append(s.FOLDED_INPUT_DIAGONAL)
    ours["folded_input_diagonal"] = [next(iter(ours["modules"].values()))["input_group"]]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, shutil.copytree(folder, folder.with_name("state"), ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture(scope="module")
def dense(folder):
    """The toy's weights at stored precision, as an ordinary model."""
    path = folder.with_name("dense")
    load_dense(folder).save_pretrained(path)
    write_tokenizer(path, PARALLEL_TOY["vocab"])
    return path


@pytest.fixture(scope="module")
def results(folder, adapter, folded, other, dense, stateful):
    toy, twice = str(folder), LONGER[0] + LONGER[1]
    jobs = {
        "alone": dict(prompts=PROMPTS, new=LONG),
        "alone, off": dict(prompts=PROMPTS, new=LONG, options=OFF),
        "together": dict(prompts=LONGER, new=LONG, together=True),
        "chunked": dict(prompts=PROMPTS, new=LONG, options=OFF | {"max_num_batched_tokens": 16}),
        "mixed": dict(prompts=PROMPTS, new=LONG, together=True, options=OFF | {"max_num_batched_tokens": 16}),
        "cached": dict(prompts=[twice, twice], options=OFF | {"enable_prefix_caching": True, "block_size": 32}),
        "drafts": dict(prompts=PROMPTS, new=LONG, options=NGRAM),
        "drafts, off": dict(prompts=PROMPTS, new=LONG, options=NGRAM | OFF),
        "dense": dict(folder=str(dense), prompts=PROMPTS, new=LONG),
        "dense, quantized draft": dict(folder=str(dense), prompts=PROMPTS, new=LONG, options=drafted_by(folder)),
        "dense draft": dict(prompts=PROMPTS, new=LONG, options=drafted_by(dense)),
        "dense draft, off": dict(prompts=PROMPTS, new=LONG, options=drafted_by(dense) | OFF),
        "quantized draft": dict(prompts=PROMPTS, new=LONG, options=drafted_by(folder)),
        "adapter": dict(prompts=LONGER, lora=str(adapter[0]), options=OFF | {"enable_lora": True, "max_lora_rank": 8}),
        "folded": dict(prompts=LONGER, folder=str(folded)),
        "folded, adapter": dict(
            prompts=LONGER, folder=str(folded), lora=str(adapter[0]), options={"enable_lora": True, "max_lora_rank": 8}
        ),
        "bfloat16": dict(prompts=PROMPTS, new=1, options={"dtype": "bfloat16"}),
        "float16": dict(prompts=PROMPTS, new=1, options={"dtype": "float16"}),
        "fp8 cache": dict(prompts=PROMPTS, new=1, options={"kv_cache_dtype": "fp8"}),
        "dummy": dict(prompts=LONGER, options={"load_format": "dummy"}),
        "reloaded": dict(
            prompts=PROMPTS, new=LONG, other=str(other), steps=["ask", "reload", "ask", "reload other", "ask", "reload", "ask"]
        ),
        "other": dict(folder=str(other), prompts=PROMPTS, new=LONG),
    }
    source, one = map(str, stateful)
    jobs |= {
        "saved": dict(folder=source, prompts=PROMPTS[2:4], steps=["ask", "save", "ask"], save=one),
        "restored": dict(folder=one, prompts=PROMPTS[2:4], options=SHARDED),
        "restored, adapter": dict(
            folder=one, prompts=LONGER, lora=str(adapter[0]), options=SHARDED | {"enable_lora": True, "max_lora_rank": 8}
        ),
        "restored, auto": dict(folder=one, prompts=LONGER),
    }
    jobs |= {
        f"{family}, {profile}": dict(
            folder=str(write_family(folder.with_name(f"{family} {profile}"), family)),
            prompts=PROMPTS[:4],
            options=OFF if profile == "off" else {},
        )
        for family, profiles in FAMILIES.items()
        for profile in profiles
    }
    asked, answered = folder.with_name("jobs.json"), folder.with_name("results.json")
    asked.write_text(json.dumps({name: {"folder": toy} | job for name, job in jobs.items()}))
    script = Path(__file__).with_name("engines.py")
    log = folder.with_name("log")
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, str(script), str(asked), str(answered)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            timeout=550,
        )
    found = json.loads(answered.read_text())
    assert set(found) == set(jobs), log.read_text()[-4000:]
    return found


def answers(results, name):
    assert "error" not in results[name], results[name]["error"]
    return results[name]["asked"][0]


def test_alone_it_is_the_float64_reference(folder, results):
    got, model = answers(results, "alone"), reference_model(folder, "3.0")
    for prompt, tokens, logprobs in zip(PROMPTS, got["tokens"], got["logprobs"], strict=True):
        want, want_logprobs = greedy(model, prompt)
        assert tokens[: len(want)] == want
        differences = (torch.tensor(logprobs[: len(want)]) - torch.tensor(want_logprobs)).abs()
        assert differences.median() <= LOGPROB_BOUNDS["graded"][0]


@pytest.mark.parametrize(
    "name, reference, prompts",
    [
        # Decode steps of several requests are graded row by row; prompts above the limit never are.
        ("together", "alone", len(LONGER)),
        # Without grading, where a row runs does not matter: chunks, tails of chunks, decode steps beside chunks.
        ("chunked", "alone, off", len(PROMPTS)),
        ("mixed", "alone, off", len(PROMPTS)),
        # A step that verifies 3 drafts has 4 rows, below the limit: graded like the steps that it stands for.
        ("drafts", "alone", len(PROMPTS)),
        ("drafts, off", "alone, off", len(PROMPTS)),
        # A draft model is another checkpoint in the same engine.
        ("dense draft", "alone", len(PROMPTS)),
        ("dense draft, off", "alone, off", len(PROMPTS)),
        ("quantized draft", "alone", len(PROMPTS)),
        ("dense, quantized draft", "dense", len(PROMPTS)),
    ],
)
def test_the_text_does_not_depend_on(results, name, reference, prompts):
    assert answers(results, name)["tokens"] == answers(results, reference)["tokens"][:prompts]


def test_drafts_are_accepted_with_and_without_grading(results):
    for name in ("drafts", "drafts, off", "dense draft", "dense draft, off", "quantized draft", "dense, quantized draft"):
        metrics = results[name]["metrics"]
        drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
        print(f"{name}: {accepted} of {drafted} drafted tokens accepted")
        assert 0 < accepted <= drafted and accepted >= 0.5 * drafted  # this text repeats itself


def test_reloaded_weights_answer_as_a_fresh_engine_of_theirs(results):
    first, second = answers(results, "alone")["tokens"], answers(results, "other")["tokens"]
    assert first != second and "error" not in results["reloaded"], results["reloaded"].get("error")
    assert [asked["tokens"] for asked in results["reloaded"]["asked"]] == [first, first, second, second]


def test_a_saved_state_answers_as_what_was_saved(results):
    """Text and log-probabilities, to the last bit: the same tensors, prepared in the same way. Saving changes nothing."""
    saved, restored = results["saved"], results["restored"]
    assert "error" not in saved and "error" not in restored, (saved.get("error"), restored.get("error"))
    assert len(saved["asked"]) == 2 and all(asked == restored["asked"][0] for asked in saved["asked"])


def test_a_saved_state_is_refused_where_it_does_not_fit(results):
    assert "NotImplementedError: LoRA on this checkpoint: its folded_input_diagonal" in results["restored, adapter"]["error"]
    assert (
        "tensor parallel size 1, not a checkpoint. Serve it with --load-format sharded_state"
        in results["restored, auto"]["error"]
    )


def test_a_cached_prefix_changes_nothing(results):
    got = answers(results, "cached")
    assert got["cached"] == [0, 32] and got["tokens"][0] == got["tokens"][1]


def test_an_adapter_adds_to_the_dequantized_weights(folder, adapter, results):
    model = load_dense(folder)
    before = [greedy(model, prompt) for prompt in LONGER]
    for name, delta in adapter[1].items():
        model.get_submodule(name).weight += delta
    got = answers(results, "adapter")
    for prompt, (_, plain), tokens, logprobs in zip(LONGER, before, got["tokens"], got["logprobs"], strict=True):
        want, want_logprobs = greedy(model, prompt)
        assert tokens == want and want_logprobs != plain  # the adapter does something
        assert (torch.tensor(logprobs) - torch.tensor(want_logprobs)).abs().max() <= LOGPROB_BOUNDS["static"][1]


def test_a_folded_diagonal_serves_as_usual_and_takes_no_adapter(results):
    short, long = answers(results, "folded")["tokens"], answers(results, "alone")["tokens"]
    assert short == [tokens[: len(short[0])] for tokens in long[: len(LONGER)]]
    error = results["folded, adapter"]["error"]
    assert "NotImplementedError: LoRA on this checkpoint: its folded_input_diagonal scales the inputs of 1 groups" in error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8 cache"])
def test_half_precision_is_near_float32(results, dtype):
    half, full = answers(results, dtype), answers(results, "alone")
    for a, b, p, q in zip(half["tokens"], full["tokens"], half["logprobs"], full["logprobs"], strict=True):
        assert a[0] == b[0] and abs(p[0] - q[0]) <= 0.2


def test_dummy_weights_serve(results):
    got = answers(results, "dummy")
    assert all(len(tokens) == 12 for tokens in got["tokens"])
    assert all(torch.tensor(logprobs).isfinite().all() for logprobs in got["logprobs"])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_equal_transformers(folder, results, family):
    """Biases (Qwen2), norms of queries and keys (Qwen3, Gemma 3), sliding windows (Mistral, Gemma 3), linears that are stored
    fused (Phi-3). Without grading every token is compared, with it the first: random models part at the first moved code."""
    for profile in FAMILIES[family]:
        own = folder.with_name(f"{family} {profile}")
        model = load_dense(own) if profile == "off" else reference_model(own, "4.0")
        got = answers(results, f"{family}, {profile}")
        for prompt, tokens, logprobs in zip(PROMPTS, got["tokens"], got["logprobs"], strict=False):
            want, want_logprobs = greedy(model, prompt)
            if profile == "off":
                assert tokens == want
            compared = len(want) if profile == "off" else 1
            difference = (torch.tensor(logprobs[:compared]) - torch.tensor(want_logprobs[:compared])).abs().max()
            assert difference <= LOGPROB_BOUNDS["static" if profile == "off" else "graded"][1], (profile, len(prompt))
