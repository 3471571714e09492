#!/usr/bin/env bash
# Fuzz one part of a reader for some seconds:
#
#     tests/faults/fuzz/run.sh cpp|python archive|manifest|library|key SECONDS FOLDER
#
# FOLDER keeps the corpus and findings (TARGET-crash-*, -timeout-*, -oom-*); the last lines say how often it ran. `cpp` takes clang
# with its sanitizers, and for keys OpenSSL's headers; `python`, which has no target of keys, a Python named by FUZZ_PYTHON that has
# this library, what its tests need, and atheris.
set -euo pipefail
cd "$(dirname "$0")/../../.."
language=$1 target=$2 seconds=$3 folder=$4
python=${FUZZ_PYTHON:-python}
export PYTHONPATH="$PWD:$PWD/tests/unit${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder/$target"
FUZZ_SCRATCH=$(mktemp -d -p /dev/shm)
export FUZZ_SCRATCH FUZZ_TARGET=$target
trap 'rm -rf "$FUZZ_SCRATCH"' EXIT
"$python" -m tests.faults.fuzz.seeds "$folder/seeds"
common=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1
  -dict="$folder/seeds/dictionary" -artifact_prefix="$folder/$target-" "$folder/$target" "$folder/seeds/$target")
case $language in
  python) "$python" tests/faults/fuzz/fuzz_reader.py "$target" "${common[@]}" ;;
  cpp)
    "${CLANGXX:-clang++}" -std=c++17 -g -O2 -Wall -Wextra -Werror -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
      -DCUTLASS_OPS_SIGNATURES=1 -Icpp/include -isystem "$("$python" -m tvm_ffi.config --dlpack-includedir)" \
      tests/faults/fuzz/fuzz_reader.cpp cpp/src/{files,manifest,elf,sha256,signing}.cpp -lcrypto -o "$folder/fuzz_cpp"
    "$folder/fuzz_cpp" "${common[@]}"
    ;;
esac
