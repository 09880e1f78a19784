#!/usr/bin/env bash
# Greedy text and lm-eval's perplexity of a real server against the transformers reference, eager and traced.
#
#   benchmarks/parity.sh CHECKPOINT [PORT]
#
# Starts `vllm serve` (float32, CPU) once per row of the matrix below, runs benchmarks/compare_server.py against it and, for the
# first row, lm-eval beside benchmarks/lm_eval_perplexity.py. Exit code 0 only if all texts are equal; the two perplexities are
# printed one under the other. Needs `make env-calibrate eval-env`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkpoint=$(realpath "$1")
port=${2:-8302}
url=http://127.0.0.1:$port
calibrate=$PWD/.venvs/calibrate/bin serve=$PWD/.venvs/serve/bin
scratch=$(mktemp -d)
server=
stop() { [ -z "$server" ] || { kill -TERM "$server" 2>/dev/null && wait "$server" 2>/dev/null || true; server=; }; }
trap 'stop; rm -rf "$scratch"' EXIT
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_DISABLE_COMPILE_CACHE=1 OMP_WAIT_POLICY=passive TMPDIR=$scratch
failed=0

complete() { curl -sf "$url/v1/completions" -H 'Content-Type: application/json' -d "$1" >/dev/null; }

row() { # profile activation eager|traced prompt-set
  local mode=(--enforce-eager)
  unset VLLM_CPU_CI_ENV
  # VLLM_CPU_CI_ENV traces the model with a cheap backend and skips the warm-up.
  [ "$3" = eager ] || { mode=() && export VLLM_CPU_CI_ENV=1; }
  (cd "$scratch" && exec "$serve/vllm" serve "$checkpoint" --quantization tilequant --host 127.0.0.1 --port "$port" \
    --dtype float32 --max-model-len 1024 --max-num-seqs 4 --served-model-name parity "${mode[@]}" \
    --additional-config "{\"tilequant\": {\"profile\": \"$1\", \"activation\": \"$2\"}}") >"$scratch/server.log" 2>&1 &
  server=$!
  until curl -sf "$url/health" >/dev/null; do
    kill -0 "$server" 2>/dev/null || { tail -20 "$scratch/server.log"; exit 1; }
    sleep 1
  done
  # Without a warm-up the first request is what gets traced: a single row would be taken for a constant.
  complete '{"model": "parity", "prompt": "A first request of more than eight tokens, so that no size is one.", "max_tokens": 2}'
  echo "== profile $1, activation $2, $3"
  "$calibrate/python" benchmarks/compare_server.py --checkpoint "$checkpoint" --server "$url/v1" --profile "$1" \
    --activation "$2" --set "$4" 2>"$scratch/compare.log" || { failed=1; tail -3 "$scratch/compare.log"; }
}

row off none eager open
"$serve/lm_eval" run --model local-completions --tasks tilequant_perplexity --include_path examples/lm_eval --batch_size 1 \
  --model_args "model=parity,base_url=$url/v1/completions,tokenizer=$checkpoint,tokenized_requests=True,num_concurrent=2,max_retries=1,max_length=1024" \
  2>"$scratch/lm_eval.log" | grep perplexity || { tail -5 "$scratch/lm_eval.log"; exit 1; }
"$calibrate/python" benchmarks/lm_eval_perplexity.py --checkpoint "$checkpoint" --profile off --activation none \
  --documents configs/calibration/heldout.txt 2>/dev/null
stop
row 3.0 group64 eager steady; stop
row off none traced open; stop
row 3.0 group64 traced steady; stop
exit "$failed"
