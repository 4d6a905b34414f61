#!/usr/bin/env bash
# Everything that wants a GPU, in one run of about ten minutes: bash tests/gpu.sh OUT [COMMIT]
#
# The sanitizer's kernels are compiled first. Then the GPU tests, samebits verify --thorough and compute-sanitizer side
# by side, then the benchmarks alone. What runs out of time is interrupted, so that its report is not lost.
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
  timeout --signal INT --kill-after 20 "$limit" "$@" >"$out/$name.log" 2>&1 &
  pids[$name]=$!
}
finish() {
  for name in "${!pids[@]}"; do
    wait "${pids[$name]}"
    codes[$name]=$?
    unset "pids[$name]"
  done
}

start compile 120 "$python" tests/sanitize.py --every 8 --compile
finish
start verify 280 "$python" -m samebits verify --thorough --json "$out/verify.json"
start pytest 280 "$python" -m pytest -m gpu -n 6 -v -p no:cacheprovider --tb=short
start triton 280 "$python" -m pytest -m gpu -n 4 -v -p no:cacheprovider --backend triton \
  tests/test_conformance.py tests/test_invariance.py tests/test_logp.py tests/test_gpu.py \
  -k "not test_verify and not loads_no_kernel"  # which need row kernels
start memcheck 280 compute-sanitizer --error-exitcode 1 --tool memcheck --report-api-errors no \
  "$python" tests/sanitize.py --every 8 --triton
start racecheck 280 compute-sanitizer --error-exitcode 1 --tool racecheck "$python" tests/sanitize.py --every 8
finish
for bench in gpu logp models; do
  start "$bench" 290 "$python" -m "benchmarks.$bench" --commit "$commit" --out "$out/$bench.json"
  finish
done

status=0
for name in compile pytest triton verify memcheck racecheck gpu logp models; do
  printf '\n==> %s: exit %s\n' "$name" "${codes[$name]}"
  tail -n 24 "$out/$name.log" | cut -c1-180
  [ "${codes[$name]}" = 0 ] || status=1
done
exit $status
