#!/usr/bin/env bash
# Run the loading tests against the Python side of other vLLM releases: what drifts between releases is Python.
#
#   scripts/vllm_versions.sh 0.24.0 0.33.0
#
# Downloads each release's wheel (some 300 MB), keeps its *.py files in .cache/vllm-<version>, and puts them before the installed
# vLLM. No compiled code of that release runs, and torch is the serving environment's: it shows that the plugin's calls into vLLM
# still fit, not that the release serves. Needs `make env-serve`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venvs/serve/bin/python
[ $# -gt 0 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
status=0
for version in "$@"; do
  tree=$PWD/.cache/vllm-$version
  if [ ! -d "$tree/vllm" ]; then
    scratch=$(mktemp -d)
    "$python" -m pip download -q --no-deps --no-cache-dir -d "$scratch" "vllm==$version"
    mkdir -p "$tree"
    "$python" - "$scratch" "$tree" <<'PYTHON'
import glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/*.whl")[0])
wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith((".py", ".json"))])
PYTHON
    rm -rf "$scratch"
  fi
  PYTHONPATH=$tree "$python" -c "import vllm; assert vllm.__file__.startswith('$tree'), vllm.__file__" 2>/dev/null
  echo "== vLLM $version (Python files only)"
  PYTHONPATH=$tree VLLM_TARGET_DEVICE=cpu OMP_NUM_THREADS=1 "$python" -m pytest -q --side=serve tests/test_serve_{loading,shards,head,reload,sharded,graphs}.py || status=1
done
exit $status
