#!/usr/bin/env bash
# Two processes over the real memfd: random SIGKILLs, and a death at each named moment between two stores.
#
#   ci/storm.sh          about five minutes; the code as it ships, then the build with named moments
#   ci/storm.sh --fast   under a minute; the build with named moments only
#
# Every moment that the sources name must be reached. Planted faults must be caught at theirs.
set -euo pipefail
cd "$(dirname "$0")/.."

# run | fault, as the sources name it | what the failing run says
FAULTS=(
  'slow_release|hold_as_mark|a hold is lost'
  'slow_release_over_a_death|unheld_before_returned|has changed'
  'deaths|ended_not_looked_at|a whole batch was not handed out'
  'registered|punched_below_registered|the driver has other pages than the slot'
  'registered|retired_while_registered|the driver has other pages than the slot'
  'oversize|segment_used_while_lent|has changed'
  'forks|given_back_under_a_child|found a batch changed'
  'slow_forks|fork_under_way_ignored|found a batch changed'
  'samples|cleared_while_read|a sample is wrong'
  'samples|checksum_ignored|a sample is wrong'
  'samples_deaths|published_before_written|a published sample is not there'
  'joint|joint_run_kept|a batch does not come'
  'scheduling|lost_before_drained|batches that were not handed out'
  'scheduling|epoch_ignored|a batch of another epoch'
  'scheduling|lost_in_turn_only|deaths are told late'
)

RUN_LIMIT_S=600
export RINGLOADER_TEST_SEED="${RINGLOADER_TEST_SEED:-$RANDOM}"
unset RINGLOADER_FAILPOINT RINGLOADER_FAULT
# Processes that panic at a planted fault end at once: reading symbols takes them longer than a round.
export RUST_BACKTRACE=0

case "${1:-}" in
  '') fast=0 seconds=120 ;;
  --fast) fast=1 seconds=6 ;;
  *) echo "usage: $0 [--fast]" >&2; exit 2 ;;
esac
target="${CARGO_TARGET_DIR:-target}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
  tail -n 60 "$log" >&2
  echo "storm: FAILED: $* (seed $RINGLOADER_TEST_SEED)" >&2
  exit 1
}

# run CONFIGURATION SECONDS FAULT ARGUMENTS...: the runs of one configuration, built in a directory of its own.
run() {
  local flags='--cfg ringloader_failpoints --cfg ringloader_faults'
  [[ $1 == failpoints ]] || flags=''
  CARGO_TARGET_DIR="$target/$1" RUSTFLAGS="$flags" RINGLOADER_TEST_SECONDS="$2" RINGLOADER_FAULT="$3" \
    timeout "$RUN_LIMIT_S" cargo test -p ringloader-core --profile loom --test two_process "${@:4}" >"$log" 2>&1
}

batches=0 kills=0
hold() {
  local counts
  run "$1" 1 '' --no-run || fail "$1 does not build"
  run "$1" "$2" '' || fail "$1: a run does not hold"
  counts=$(sed -nE 's/^two_process: ([0-9]+) batches, ([0-9]+) kills$/\1 \2/p' "$log")
  read -r b k <<<"${counts:-0 0}"
  ((b > 0 && k > 0)) || fail "$1 ran nothing"
  batches=$((batches + b)) kills=$((kills + k))
}

((fast)) || hold storm "$seconds"
hold failpoints "$((fast ? seconds : 20))"

named=$(grep -rhoE 'failpoint\("[a-z-]+"\)' rust/core/src | cut -d'"' -f2 | sort -u)
covered=$(sed -nE 's/^point ([a-z-]+)$/\1/p' "$log" | sort -u)
[[ -n $named && $named == "$covered" ]] ||
  fail "moments in the sources and moments reached differ: $(comm -3 <(echo "$named") <(echo "$covered") | xargs)"

caught=0
for row in "${FAULTS[@]}"; do
  IFS='|' read -r name fault reason <<<"$row"
  # The fault shows where threads happen to meet: a round may pass without it, a hundred in a row do not. A round of a busy
  # machine has few deaths.
  found=0
  for round in {1..100}; do
    status=0
    RINGLOADER_TEST_SEED=$((RINGLOADER_TEST_SEED + round)) run failpoints 1 "$fault" -- "$name" || status=$?
    ((status != 124)) || fail "$name with $fault planted has not ended in $RUN_LIMIT_S s"
    # A round in which the machine was too busy may fail for another reason.
    if ((status != 0)) && grep -qF "$reason" "$log"; then found=1 && break; fi
  done
  ((found)) || fail "$name with $fault planted does not fail with '$reason' in $round rounds"
  caught=$((caught + 1))
done
((caught > 0)) || fail "nothing was planted"
echo "storm: $batches batches, $kills kills, $(wc -w <<<"$named") named moments, $caught planted faults caught (seed $RINGLOADER_TEST_SEED)"
