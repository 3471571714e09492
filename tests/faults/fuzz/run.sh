#!/usr/bin/env bash
# Fuzz one part of a reader for some seconds:
#
#     tests/faults/fuzz/run.sh cpp|python archive|manifest|library|key SECONDS FOLDER
#
# FOLDER keeps corpus, log and findings (crash-*, timeout-*, oom-*). `cpp` takes clang with its sanitizers; `python` a Python that
# has this library, what it needs and atheris, named by FUZZ_PYTHON.
set -euo pipefail
cd "$(dirname "$0")/../../.."
language=$1 target=$2 seconds=$3 folder=$4
python=${FUZZ_PYTHON:-python}
export PYTHONPATH="$PWD:$PWD/tests/unit${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder/$target"
"$python" -m tests.faults.fuzz.seeds "$folder/seeds"
common=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1
  -dict="$folder/seeds/dictionary" -artifact_prefix="$folder/$target-" "$folder/$target" "$folder/seeds/$target")
case $language in
  python) exec "$python" tests/faults/fuzz/fuzz_reader.py "$target" "${common[@]}" ;;
  cpp)
    "${CLANGXX:-clang++}" -std=c++17 -g -O2 -Wall -Wextra -Werror -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
      -DCUTLASS_OPS_SIGNATURES=1 -Icpp/include -isystem "$("$python" -m tvm_ffi.config --dlpack-includedir)" \
      tests/faults/fuzz/fuzz_reader.cpp cpp/src/{files,manifest,elf,sha256,signing}.cpp -lcrypto -o "$folder/fuzz_cpp"
    FUZZ_TARGET=$target exec "$folder/fuzz_cpp" "${common[@]}"
    ;;
esac
