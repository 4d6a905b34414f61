#!/usr/bin/env bash
# All tests that want a GPU: bash tests/gpu.sh OUT [NAME...]
#
# NAME: pytest, triton, memcheck, racecheck, native, which run side by side; or verify, which takes all CPUs and comes last. The
# sanitizer's kernels are compiled first. What takes longer than LIMIT seconds, 1,200 unless told, is interrupted, so that its
# report is not lost; PYTEST_ADDOPTS='-k ...' chooses tests. The benchmarks want the GPU for themselves: benchmarks/gpu.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
all="pytest triton memcheck racecheck native verify"
for name in "$@"; do
  [[ " $all " == *" $name "* ]] || { echo "unknown: $name; one or more of: $all" && exit 2; }
done
wanted=" ${*:-$all} "
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/native${PYTHONPATH:+:$PYTHONPATH} SAMEBITS_CACHE_DIR=${SAMEBITS_CACHE_DIR:-$out/../samebits-cache}
python=${PYTHON:-python3}
sanitize=tests/support/sanitize.py

declare -A pids codes
start() { # NAME COMMAND...
  local name=$1
  shift
  [[ $wanted == *" $name "* ]] || return 0
  timeout --signal INT --kill-after 20 "${LIMIT:-1200}" "$@" >"$out/$name.log" 2>&1 &
  pids[$name]=$!
}
finish() {
  for name in "${!pids[@]}"; do
    wait "${pids[$name]}"
    codes[$name]=$?
    unset "pids[$name]"
  done
}

for tool in memcheck racecheck; do
  [[ $wanted == *" $tool "* ]] || continue
  start "$tool" "$python" $sanitize --every 32 --compile $([ $tool = racecheck ] && echo --racecheck)
  finish
  [ "${codes[$tool]}" = 0 ] || { tail -n 5 "$out/$tool.log" && exit 1; }
done
export OMP_NUM_THREADS=2 # of each of so many processes, in which PyTorch and the CPU reference would start one for each CPU
start pytest "$python" -m pytest -m gpu -n "${WORKERS:-10}" -v -p no:cacheprovider --tb=short -rfE --durations 40
start triton "$python" -m pytest -m gpu -n 3 -v -p no:cacheprovider --tb=short -rfE --durations 20 --backend triton \
  tests/contract/test_conformance.py tests/contract/test_invariance.py tests/ops/test_logp.py tests/ops/test_logp_targets.py \
  tests/backends/test_gpu.py \
  -k "not test_verify and not step and not tensor_core_sm90 and not grouped and not equal_sequences_on_a_stream" # which need row kernels, or are not Triton's
start memcheck compute-sanitizer --error-exitcode 1 --tool memcheck --report-api-errors no \
  "$python" $sanitize --every 32 --triton
start native bash native/tests/memcheck.sh "$out/native"
start racecheck compute-sanitizer --error-exitcode 1 --tool racecheck "$python" $sanitize --every 32 --racecheck
finish
unset OMP_NUM_THREADS
start verify "$python" -m samebits verify --thorough --json "$out/verify.json"
finish

status=0
for name in pytest triton memcheck racecheck native verify; do
  [ -n "${codes[$name]:-}" ] || continue
  printf '\n==> %s: exit %s\n' "$name" "${codes[$name]}"
  grep -E '^(FAILED|ERROR)' "$out/$name.log" | cut -c1-180 | sort -u
  tail -n 12 "$out/$name.log" | cut -c1-180
  [ "${codes[$name]}" = 0 ] || status=1
done
exit $status
