#!/usr/bin/env bash
# Tests of memory that goes, moves or is missing while its bytes are read, under AddressSanitizer: no report, and one for
# each planted fault.
#
#   ci/asan.sh PYTHON    PYTHON has torch and pytest
#
# The extension is built with the sanitizer; its runtime is that of gcc, loaded before Python. Memory that torch and
# Python allocate is known to it: Python allocates with malloc.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${1:?usage: $0 PYTHON}
# Tests that run without a report. A limit of address space leaves the sanitizer none.
TESTS=(
  'tests/faults/test_moved_storages.py'
  'tests/faults/test_no_memory.py -k test_each_allocation_fails'
)
# fault, as the sources name it | tests | the report
FAULTS=(
  'gather_unheld|tests/faults/test_moved_storages.py -k replaced|heap-use-after-free'
  'collector_on|tests/faults/test_moved_storages.py -k finaliser|heap-use-after-free'
  'storage_too_small|tests/faults/test_moved_storages.py -k larger|heap-buffer-overflow'
)

RUN_LIMIT_S=1800
# The sanitizer flags are unstable: this lets the pinned stable compiler take them.
export RUSTC_BOOTSTRAP=1
target=$(rustc -vV | sed -n 's/^host: //p')
package=build/asan
# The sanitizer looks up what throws C++ exceptions when it starts.
runtime=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so.6)
log=$(mktemp)
reports=$(mktemp -d)
trap 'rm -rf "$log" "$reports"' EXIT

fail() {
  tail -n 60 "$log" >&2
  { cat "$reports"/* 2>/dev/null || true; } | head -n 60 >&2
  echo "asan: FAILED: $*" >&2
  exit 1
}

# run FAULT ARGUMENTS...: the tests, with what the sanitizer says in files: the tests catch a process's output.
run() {
  local fault=$1
  shift
  rm -f "$reports"/*
  LD_PRELOAD="$runtime" PYTHONMALLOC=malloc RINGLOADER_FAULT="$fault" PYTHONPATH="$package" \
    ASAN_OPTIONS="detect_leaks=0:exitcode=66:log_path=$reports/report" \
    timeout "$RUN_LIMIT_S" "$PYTHON" -m pytest -q -p no:cacheprovider "$@" >"$log" 2>&1
}

[[ $runtime == /*:/* ]] || fail "gcc has no libasan.so and libstdc++.so.6"
# --target: the flags are not for build scripts and macros, which run in the compiler.
CARGO_TARGET_DIR=target/asan PYO3_PYTHON="$PYTHON" PYO3_BUILD_EXTENSION_MODULE=1 \
  RUSTFLAGS='-Zsanitizer=address -Cunsafe-allow-abi-mismatch=sanitizer --cfg ringloader_faults' \
  cargo build -q -p ringloader-py --profile dev-wheel --target "$target" >"$log" 2>&1 || fail 'it does not build'
rm -rf "$package"
mkdir -p "$package"
cp -r python/ringloader "$package/"
cp "target/asan/$target/dev-wheel/lib_native.so" "$package/ringloader/_native.abi3.so"
LD_PRELOAD="$runtime" PYTHONPATH="$package" ASAN_OPTIONS=detect_leaks=0 "$PYTHON" -c \
  'import ringloader._native as native; assert "build/asan" in native.__file__, native.__file__' >"$log" 2>&1 ||
  fail 'Python does not load the extension'

passed=0
for row in "${TESTS[@]}"; do
  # shellcheck disable=SC2086 # words of a row
  run '' $row || fail "$row"
  ! ls "$reports"/* >/dev/null 2>&1 || fail "$row has a report"
  count=$(sed -nE 's/^([0-9]+) passed.*/\1/p' "$log")
  ((${count:-0} > 0)) || fail "$row ran no test"
  passed=$((passed + count))
done

caught=0
for row in "${FAULTS[@]}"; do
  IFS='|' read -r fault tests report <<<"$row"
  # shellcheck disable=SC2086
  ! run "$fault" $tests || fail "$tests passes with $fault planted"
  grep -qs "ERROR: AddressSanitizer: $report" "$reports"/* || fail "$fault: no $report was reported"
  caught=$((caught + 1))
done
echo "asan: $passed tests without a report, $caught planted faults caught"
