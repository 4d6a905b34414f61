#!/usr/bin/env bash
# All benchmarks that want a GPU, one after the other, in about an hour: bash benchmarks/gpu.sh OUT [COMMIT [NAME...]]
#
# With OUT, results go there and not into benchmarks/results/; COMMIT names what is measured where git cannot tell. NAME: only
# these, such as bench and attention. On a host of several GPUs, each may measure others, on CPUs of its own:
# CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 bash benchmarks/gpu.sh OUT COMMIT NAME...
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 commit=${2:-$(git rev-parse HEAD)}
shift "$(($# < 2 ? $# : 2))"
wanted=" $* "
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$PWD/native${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3} status=0 ran=""
"$python" -c 'import samebits.backends._replay' || { echo "steps and calls want samebits' C extension: pip install -e ." && exit 2; }

measure() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  ran+=" $name "
  printf '\n==> %s\n' "$name"
  timeout --signal INT --kill-after 20 "$limit" "$python" -m benchmarks "$@" --commit "$commit" --out "$out/$name.json" \
    >"$out/$name.log" 2>&1 || status=1
  tail -n 24 "$out/$name.log" | cut -c1-180
}

measure logp 150 logp
measure peers 200 peers
measure models 170 models
measure steps 900 steps
measure rows 150 rows
measure fused 180 fused
measure grouped 240 grouped
measure host 120 host
measure recurrent 300 recurrent --limit 30
measure hybrids 300 hybrids
measure native 200 native
measure scaled 120 scaled --only scaled
measure scaled_grouped 60 scaled --only scaled_grouped
measure unaligned 60 unaligned
measure fp8_accuracy 60 fp8_accuracy
measure fp8_invariance 180 fp8_invariance
measure segments 200 segments
measure segments_float32 150 segments --float32 --rows 1 8 64 512 2048
measure held_out 300 held_out
measure bench 450 gpu
measure attention 450 attention
measure paged 90 paged
measure attention_invariance 180 attention_invariance
measure counters 60 counters
measure triton 200 gpu --quick --backend triton
measure verify 600 verify
if "$python" -c 'import vllm' 2>/dev/null; then
  measure vllm 600 vllm
  measure vllm_bits 400 vllm_bits
fi
for name in $wanted; do
  [[ $ran == *" $name "* ]] || { echo "unknown: $name" && status=2; }
done
exit $status
