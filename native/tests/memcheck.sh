#!/usr/bin/env bash
# smoke.c under the sanitizer, with an archive for the GPU at hand: bash native/tests/memcheck.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
mkdir -p "$1"
arch=$("$python" -c 'from samebits.backends.cuda.devices import device_info; print(device_info(0).arch)')
"$python" -m samebits export --arch "$arch" --shape 128x96 --head 64 "$1"
cc -std=c11 -g -Wall -Wextra -Werror -D_POSIX_C_SOURCE=200809L -Inative/src -o "$1/smoke" native/tests/smoke.c native/src/*.c -ldl -lpthread
compute-sanitizer --tool memcheck --error-exitcode 1 "$1/smoke" "$1/$arch.samebits"
