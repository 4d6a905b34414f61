#!/usr/bin/env bash
# Everything that wants a GPU, in one run of about ten minutes: bash tests/gpu.sh OUT [COMMIT]
#
# The GPU tests, samebits verify --thorough and compute-sanitizer side by side, then the benchmark alone.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 commit=${2:-$(git rev-parse HEAD)}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD SAMEBITS_CACHE_DIR=${SAMEBITS_CACHE_DIR:-$out/../samebits-cache}
python=${PYTHON:-python3}

declare -A pids codes
start() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 &
  pids[$name]=$!
}
finish() {
  for name in "${!pids[@]}"; do
    wait "${pids[$name]}"
    codes[$name]=$?
    unset "pids[$name]"
  done
}

start verify 280 "$python" -m samebits verify --thorough --json "$out/verify.json"
start pytest 280 "$python" -m pytest -m gpu -n 6 -q -p no:cacheprovider
start triton 280 "$python" -m pytest -m gpu -n 4 -q -p no:cacheprovider --backend triton \
  tests/test_conformance.py tests/test_invariance.py tests/test_gpu.py -k "not test_verify"
sanitize='"$0" tests/sanitize.py --every 8 --compile && compute-sanitizer --error-exitcode 1 "$@" "$0" tests/sanitize.py --every 8'
start memcheck 280 bash -c "$sanitize" "$python" --tool memcheck --report-api-errors no
start racecheck 280 bash -c "$sanitize" "$python" --tool racecheck
finish
start bench 290 "$python" -m benchmarks.gpu --commit "$commit" --out "$out/bench.json"
finish

status=0
for name in pytest triton verify memcheck racecheck bench; do
  printf '\n==> %s: exit %s\n' "$name" "${codes[$name]}"
  tail -n 24 "$out/$name.log" | cut -c1-180
  [ "${codes[$name]}" = 0 ] || status=1
done
exit $status
