"""Reading and judging a checkpoint folder, without vLLM and without transformers."""
