#!/usr/bin/env bash
# The parts of the core without system calls and threads, in Miri: no undefined behaviour, no leak.
#
# Memory that processes share is out of its reach; ci/tsan.sh and ci/loom.sh look at that.
set -euo pipefail
cd "$(dirname "$0")/.."

MODULES=(batch:: bits:: plan::)
# Each tries very many values: hours in an interpreter.
TOO_LONG=(dlpack_goes_both_ways_and_names_nothing_else memory_grows_with_the_tasks_and_not_with_their_distance)

# A few cases of each property. They are kept in files, which isolation forbids.
export PROPTEST_CASES="${PROPTEST_CASES:-8}" MIRIFLAGS=-Zmiri-disable-isolation
log=$(mktemp)
trap 'rm -f "$log"' EXIT
CARGO_TARGET_DIR=target/miri cargo +nightly miri test -q -p ringloader-core --lib -- "${MODULES[@]}" \
  "${TOO_LONG[@]/#/--skip=}" | tee "$log"
grep -qE '^test result: ok\. [1-9]' "$log" || { echo "miri: no test ran" >&2; exit 1; }
