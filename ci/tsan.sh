#!/usr/bin/env bash
# The core's stress tests under ThreadSanitizer: no report, and one for each planted fault.
#
#   ci/tsan.sh           the code as it ships in 10 rounds, each planted fault in 3
#   ci/tsan.sh --fast    the build with planted faults only, first with none selected, in 2 rounds
#
# No suppressions: with those for std::thread, the planted faults are not found either.
set -euo pipefail
cd "$(dirname "$0")/.."

# Test binaries without a harness: rust/core/tests/NAME.rs. Each prints 'NAME: COUNT operations'.
BINARIES=(
  tsan_ring
  tsan_pool
)

# binary | fault, as the sources name it | the source where the race is reported
FAULTS=(
  'tsan_ring|tail_relaxed|support/payload.rs'
  'tsan_ring|tail_load_relaxed|support/payload.rs'
  'tsan_ring|head_relaxed|support/payload.rs'
  'tsan_ring|head_load_relaxed|support/payload.rs'
  'tsan_pool|slot_returned_relaxed|support/payload.rs'
  'tsan_pool|sweep_relaxed|support/payload.rs'
)

RUN_LIMIT_S=300
REPORT='SUMMARY: ThreadSanitizer: data race'
# The sanitizer flags are unstable: this lets the pinned stable compiler take them.
export RUSTC_BOOTSTRAP=1
# The first report ends a run: others would only take the time to be written.
export TSAN_OPTIONS='exitcode=66 halt_on_error=1'

case "${1:-}" in
  '') fast=0 clean_rounds=10 fault_rounds=3 ;;
  --fast) fast=1 clean_rounds=2 fault_rounds=2 ;;
  *) echo "usage: $0 [--fast]" >&2; exit 2 ;;
esac
target=$(rustc -vV | sed -n 's/^host: //p')
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
  tail -n 60 "$log" >&2
  echo "tsan: FAILED: $*" >&2
  exit 1
}

# run CONFIGURATION FAULT ARGUMENTS...: the tests of one configuration, built in a directory of its own.
run() {
  local flags='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg ringloader_tsan'
  [[ $1 == tsan ]] || flags+=' --cfg ringloader_faults'
  # --target: the flags are not for build scripts and macros, which run in the compiler.
  CARGO_TARGET_DIR="target/$1" RUSTFLAGS="$flags" RINGLOADER_FAULT="$2" timeout "$RUN_LIMIT_S" \
    cargo test -p ringloader-core --profile loom --target "$target" "${@:3}" >"$log" 2>&1
}

runs=0 operations=0
clean() {
  local binary round count
  run "$1" '' --no-run "${BINARIES[@]/#/--test=}" || fail "$1 does not build"
  for binary in "${BINARIES[@]}"; do
    for ((round = 1; round <= clean_rounds; round++)); do
      run "$1" '' --test "$binary" || fail "$1: $binary, round $round"
      ! grep -qF ThreadSanitizer "$log" || fail "$1: $binary, round $round, has a report"
      count=$(sed -nE "s/^$binary: ([0-9]+) operations$/\1/p" "$log")
      ((${count:-0} > 0)) || fail "$1: $binary ran no operation"
      runs=$((runs + 1)) operations=$((operations + count))
    done
  done
}

caught=0
catch() {
  local binary fault place round status found=0
  IFS='|' read -r binary fault place <<<"$1"
  for ((round = 1; round <= fault_rounds; round++)); do
    status=0
    run tsan-faults "$fault" --test "$binary" || status=$?
    if ((status != 0)) && grep -q "$REPORT .*$place" "$log"; then found=$((found + 1)); fi
  done
  ((found > 0)) || fail "$binary: no data race in $place reported in $fault_rounds rounds with $fault planted"
  caught=$((caught + 1))
}

((fast)) || clean tsan
clean tsan-faults
for row in "${FAULTS[@]}"; do catch "$row"; done
((runs > 0 && caught > 0)) || fail "nothing ran"
echo "tsan: $runs runs without a report ($operations operations), $caught planted faults caught"
