# Two commands for a newcomer: `make quickstart` and `make test`. Both make the environments they need.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENVS ?= .venvs
PORT ?= 8177
# MODEL: a folder or hub id (left out: the sample model). DATA: a text or JSONL file. DEVICE: cpu or cuda (left out: nvidia-smi decides).
MODEL ?=
DATA ?=
DEVICE ?=
PYTEST_ARGS ?=
# WIKITEXT: a folder with valid.txt and test.txt of WikiText-2 (raw); GSM8K: its test.jsonl; TOKENS: of the text to judge on.
WIKITEXT ?= wikitext2
GSM8K ?=
TOKENS ?= 65536
RECIPES ?= $(sort $(wildcard configs/recipes/*.yaml))
SAMPLE ?= runs/SmolLM2-135M-Instruct

CALIBRATE = $(VENVS)/calibrate/bin
SERVE = $(VENVS)/serve/bin

.PHONY: help quickstart test parity lint check quality controls format typecheck env-calibrate env-serve eval-env clean distclean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 16

quickstart: env-calibrate env-serve ## quantize a model, check it, serve it, ask it something [MODEL= DATA= PORT=]
	@$(CALIBRATE)/python scripts/quickstart.py --serve-env $(VENVS)/serve --port $(PORT) \
	  $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)')

test: lint typecheck env-serve ## lint, types, then the tests of both environments
	$(CALIBRATE)/python -m pytest --side=calibrate tests $(PYTEST_ARGS)
	$(SERVE)/python -m pytest --side=serve tests $(PYTEST_ARGS)
	@# Triton comes with vLLM; its interpreter runs the kernels' own source at tiny shapes.
	TRITON_INTERPRET=1 $(SERVE)/python -m pytest tests/test_activation_int8.py tests/test_decode_bitplane.py tests/test_prefill_calls.py tests/test_prefill_int8.py tests/test_rotation.py $(PYTEST_ARGS)

lint: env-calibrate ## ruff and marks of unfinished merges, no changes
	$(CALIBRATE)/ruff check .
	$(CALIBRATE)/ruff format --check .
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' || { echo 'marks of an unfinished merge'; exit 1; }

format: env-calibrate ## ruff, with changes
	$(CALIBRATE)/ruff check --fix .
	$(CALIBRATE)/ruff format .

# mypy sees the package as it is installed: kernels, calibrate and configs inside vllm_tilequant.
typecheck: env-calibrate ## mypy on the package as a wheel lays it out
	@rm -rf .cache/typecheck && mkdir -p .cache/typecheck
	@cp -r vllm_tilequant .cache/typecheck/ && cp -r kernels calibrate configs .cache/typecheck/vllm_tilequant/
	@root=$$PWD && python=$$(cd $(CALIBRATE) && pwd)/python && cd .cache/typecheck && \
	  "$$python" -m mypy --config-file "$$root/pyproject.toml" --cache-dir "$$root/.mypy_cache" -p vllm_tilequant

parity: env-calibrate eval-env ## a real server's greedy text and perplexity against transformers [CHECKPOINT=folder]
	benchmarks/parity.sh $(or $(CHECKPOINT),$(firstword $(wildcard runs/quickstart/*-tilequant)))

check: lint typecheck ## everything but the tests

quality: env-calibrate ## every recipe calibrated, packed and judged: the quality table and its bars [WIKITEXT= GSM8K= RECIPES= TOKENS=]
	@$(CALIBRATE)/python scripts/sample_model.py $(SAMPLE)
	$(CALIBRATE)/python benchmarks/bench_recipes.py --model $(SAMPLE) --data '$(WIKITEXT)/valid.txt' --text '$(WIKITEXT)/test.txt' \
	  $(if $(GSM8K),--also '$(GSM8K)') --tokens $(TOKENS) $(RECIPES:%=--recipe %)

controls: env-calibrate ## maps of tiles, rows, columns, modules and chance at one budget [WIKITEXT= TOKENS=]
	@$(CALIBRATE)/python scripts/sample_model.py $(SAMPLE)
	$(CALIBRATE)/python benchmarks/bench_recipes.py --model $(SAMPLE) --data '$(WIKITEXT)/valid.txt' --text '$(WIKITEXT)/test.txt' \
	  --tokens $(TOKENS) --stem controls $(patsubst %,--recipe %,configs/recipes/default.yaml $(wildcard configs/recipes/controls/*.yaml))

env-calibrate: ## the environment with llm-compressor
	@scripts/setup_env.sh calibrate $(VENVS)/calibrate $(DEVICE)

env-serve: ## the environment with vLLM
	@scripts/setup_env.sh serve $(VENVS)/serve $(DEVICE)

eval-env: env-serve ## adds lm-eval to the serving environment
	@scripts/setup_env.sh eval $(VENVS)/serve $(DEVICE)

clean: ## remove caches, builds and quickstart's results (not the environments)
	rm -rf .cache runs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venvs/*' -prune -exec rm -rf {} +

distclean: clean ## and the environments
	rm -rf $(VENVS)/calibrate $(VENVS)/serve
