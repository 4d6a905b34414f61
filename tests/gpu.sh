#!/usr/bin/env bash
# All tests that want a GPU, in one run of some eight minutes: bash tests/gpu.sh OUT
#
# The sanitizer's kernels are compiled first. Then the GPU tests, those of Triton, samebits verify --thorough and
# compute-sanitizer run side by side. What runs out of time is interrupted, so that its report is not lost. The
# benchmarks want the GPU for themselves: benchmarks/gpu.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} SAMEBITS_CACHE_DIR=${SAMEBITS_CACHE_DIR:-$out/../samebits-cache}
python=${PYTHON:-python3}

declare -A pids codes
start() { # NAME COMMAND...
  local name=$1
  shift
  timeout --signal INT --kill-after 20 "${LIMIT:-500}" "$@" >"$out/$name.log" 2>&1 &
  pids[$name]=$!
}
finish() {
  for name in "${!pids[@]}"; do
    wait "${pids[$name]}"
    codes[$name]=$?
    unset "pids[$name]"
  done
}

start compile "$python" tests/sanitize.py --every 16 --compile
finish
start compile_for_racecheck "$python" tests/sanitize.py --every 16 --compile --racecheck
finish
start pytest "$python" -m pytest -m gpu -n 8 -v -p no:cacheprovider --tb=short -rfE
start triton "$python" -m pytest -m gpu -n 3 -v -p no:cacheprovider --tb=short -rfE --backend triton \
  tests/test_conformance.py tests/test_invariance.py tests/test_logp.py tests/test_logp_targets.py tests/test_gpu.py \
  -k "not test_verify and not loads_no_kernel" # which need row kernels
start memcheck compute-sanitizer --error-exitcode 1 --tool memcheck --report-api-errors no \
  "$python" tests/sanitize.py --every 16 --triton
start racecheck compute-sanitizer --error-exitcode 1 --tool racecheck "$python" tests/sanitize.py --every 16 --racecheck
start verify "$python" -m samebits verify --thorough --json "$out/verify.json"
finish

status=0
for name in compile pytest triton verify memcheck racecheck; do
  printf '\n==> %s: exit %s\n' "$name" "${codes[$name]}"
  grep -E '^(FAILED|ERROR)' "$out/$name.log" | cut -c1-180 | sort -u
  tail -n 12 "$out/$name.log" | cut -c1-180
  [ "${codes[$name]}" = 0 ] || status=1
done
exit $status
