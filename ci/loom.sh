#!/usr/bin/env bash
# The models of the core. All must hold, and each planted fault must be caught for its own reason.
#
#   ci/loom.sh           up to 4 preemptions; the code as it ships, and the build with planted faults
#   ci/loom.sh --fast    up to 3 preemptions; the build with planted faults only, first with none selected
set -euo pipefail
cd "$(dirname "$0")/.."

# Test binaries: rust/core/tests/NAME.rs.
BINARIES=(
  loom_ring
  loom_pool
  loom_wait
  loom_forks
  loom_cache
  loom_awaited
  loom_joint
)

# binary | test | fault, as the sources name it | what the failing model says
FAULTS=(
  'loom_ring|tail_publishes_and_head_hands_back|tail_relaxed|Causality violation'
  'loom_ring|tail_publishes_and_head_hands_back|tail_load_relaxed|Causality violation'
  'loom_ring|tail_publishes_and_head_hands_back|head_relaxed|Causality violation'
  'loom_ring|tail_publishes_and_head_hands_back|head_load_relaxed|Causality violation'
  'loom_ring|tail_publishes_and_head_hands_back|hand_back_before_read|Causality violation'
  'loom_ring|bytes_come_back_through_head|head_relaxed|Causality violation'
  'loom_ring|bytes_come_back_through_head|head_load_relaxed|Causality violation'
  'loom_ring|a_producer_may_die_before_any_store|tail_before_words|torn descriptor'
  'loom_ring|a_consumer_may_die_before_any_store|head_relaxed|Causality violation'
  'loom_ring|no_wake_up_is_lost|announce_without_fence|deadlock; threads'
  'loom_ring|no_wake_up_is_lost|take_without_fence|deadlock; threads'
  'loom_ring|no_wake_up_is_lost|sleep_without_second_look|deadlock; threads'
  'loom_ring|two_ringers_lose_no_wake_up|announce_without_fence|deadlock; threads'
  'loom_ring|two_ringers_lose_no_wake_up|take_without_fence|deadlock; threads'
  'loom_ring|two_ringers_lose_no_wake_up|sleep_without_second_look|deadlock; threads'
  'loom_ring|as_many_are_woken_as_there_are_runs|announce_without_fence|deadlock; threads'
  'loom_ring|as_many_are_woken_as_there_are_runs|take_without_fence|deadlock; threads'
  'loom_ring|as_many_are_woken_as_there_are_runs|sleep_without_second_look|deadlock; threads'
  'loom_ring|as_many_are_woken_as_there_are_runs|first_sleepers_only|deadlock; threads'
  'loom_pool|two_leases_in_turn|slot_returned_relaxed|Causality violation'
  'loom_pool|two_leases_in_turn|sweep_relaxed|Causality violation'
  'loom_pool|a_worker_that_waits_for_room_finds_it_or_is_woken|announce_without_fence|deadlock; threads'
  'loom_pool|a_worker_that_waits_for_room_finds_it_or_is_woken|take_without_fence|deadlock; threads'
  'loom_pool|a_worker_that_waits_for_room_finds_it_or_is_woken|sleep_without_second_look|deadlock; threads'
  'loom_pool|a_dead_worker_passes_no_edge_on|take_over_relaxed|Causality violation'
  'loom_pool|take_over_after_a_death_before_any_store|unheld_before_returned|came back without being out'
  'loom_pool|take_over_after_a_death_before_any_store|busy_read_after_swap|came back without being out'
  'loom_pool|held_again_while_the_old_release_is_between_its_stores|hold_as_mark|a held slot was handed out'
  'loom_pool|an_own_lease_ends_while_the_slot_comes_back|own_lease_ignored|Causality violation'
  'loom_pool|a_segment_is_used_again|segment_given_back_relaxed|Causality violation'
  'loom_pool|a_segment_is_used_again|segment_back_relaxed|Causality violation'
  'loom_pool|a_chunk_is_handed_out_again_once_it_was_dropped|chunk_lease_ignored|Causality violation'
  'loom_pool|storing_meets_a_release|unheld_relaxed|Causality violation'
  'loom_pool|closing_meets_a_release|closed_by_load|the pages were not given back'
  'loom_pool|closing_meets_a_release|retire_relaxed|Causality violation'
  'loom_pool|closing_leaves_what_is_held_again|hold_as_mark|given back'
  'loom_pool|registered_pages_stay|punched_below_registered|Causality violation'
  'loom_pool|registered_pages_stay|slot_returned_relaxed|Causality violation'
  'loom_pool|registered_pages_stay|sweep_relaxed|Causality violation'
  'loom_pool|registered_pages_stay|registered_relaxed|Causality violation'
  'loom_pool|registered_pages_stay|fixed_relaxed|Causality violation'
  'loom_pool|closing_meets_unregistering|retired_while_registered|Causality violation'
  'loom_pool|closing_meets_unregistering|registered_relaxed|Causality violation'
  'loom_pool|closing_meets_unregistering|closed_by_load|the pages were given back 0 times'
  'loom_forks|the_last_reference_goes_around_a_fork|given_back_under_a_child|Causality violation'
  'loom_forks|the_last_reference_goes_around_a_fork|fork_under_way_ignored|Causality violation'
  'loom_forks|a_grandchild_outlives_the_child|given_back_under_a_child|Causality violation'
  'loom_forks|a_batch_is_lent_and_dropped_around_a_fork|lent_in_a_window|Causality violation'
  'loom_forks|storing_leaves_what_a_child_has|given_back_under_a_child|Causality violation'
  'loom_wait|in_order_the_next_worker_is_awaited|announce_without_fence|deadlock; threads'
  'loom_wait|in_order_the_next_worker_is_awaited|take_without_fence|deadlock; threads'
  'loom_wait|in_order_the_next_worker_is_awaited|sleep_without_second_look|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|first_flag_only|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|announce_without_fence|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|sleep_without_second_look|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|take_without_fence|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|ready_relaxed|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|ready_load_relaxed|deadlock; threads'
  'loom_wait|as_completed_all_workers_are_awaited|ready_after_doorbell|deadlock; threads'
  'loom_wait|a_worker_that_is_ready_commits_again|ready_set_if_clear|deadlock; threads'
  'loom_wait|as_completed_a_death_leaves_nothing_behind|ended_not_looked_at|is not handed out'
  'loom_wait|a_death_is_told_while_another_worker_is_awaited|ring_before_ended|lost with a batch in its ring'
  'loom_wait|closing_ends_the_wait|bell_before_closed|deadlock; threads'
  'loom_cache|two_that_make_one_sample_keep_one_of_theirs|there_relaxed|Causality violation'
  'loom_cache|two_that_make_one_sample_keep_one_of_theirs|there_load_relaxed|Causality violation'
  'loom_cache|two_that_make_one_sample_keep_one_of_theirs|reserved_by_store|Causality violation'
  'loom_cache|clearing_leaves_no_sample_of_before|floor_ignored|a sample of before is there'
  'loom_cache|a_record_that_is_cleared_while_it_is_read_is_not_taken|raised_without_fence|bytes that are gone'
  'loom_cache|a_record_that_is_cleared_while_it_is_read_is_not_taken|looked_without_fence|bytes that are gone'
  'loom_awaited|the_end_waits_for_a_thread_or_the_thread_stays_out|looked_before_counted|Causality violation'
  'loom_awaited|the_end_waits_for_a_thread_or_the_thread_stays_out|entered_relaxed|Causality violation'
  'loom_awaited|the_end_waits_for_a_thread_or_the_thread_stays_out|left_relaxed|Causality violation'
  'loom_awaited|the_end_waits_for_a_thread_or_the_thread_stays_out|count_relaxed|Causality violation'
  'loom_awaited|the_end_waits_for_all_threads|looked_before_counted|Causality violation'
  'loom_joint|the_last_of_two_workers_collates|joint_free_relaxed|Causality violation'
  'loom_joint|the_last_of_two_workers_collates|joint_claim_relaxed|Causality violation'
  'loom_joint|a_worker_claims_what_it_wants_where_another_batch_is_laid_out|joint_claim_relaxed|Causality violation'
  'loom_joint|the_last_of_two_workers_collates|joint_made_relaxed|a part of another run'
  'loom_joint|the_last_of_two_workers_collates|joint_last_relaxed|a part of another run'
  'loom_joint|the_last_of_two_workers_collates|joint_bit_before_part|Causality violation'
  'loom_joint|rows_of_two_workers_become_one_batch|joint_rows_relaxed|Causality violation'
  'loom_joint|rows_of_two_workers_become_one_batch|joint_rows_load_relaxed|Causality violation'
  'loom_joint|rows_of_two_workers_become_one_batch|joint_made_relaxed|a part of another run'
  'loom_joint|rows_of_two_workers_become_one_batch|joint_bit_before_part|Causality violation'
  'loom_joint|rows_are_written_again_once_a_lost_worker_has_ended|joint_lost_while_it_lives|Causality violation'
  'loom_joint|a_place_is_used_again_once_a_lost_worker_has_ended|joint_lost_while_it_lives|Causality violation'
  'loom_joint|an_epoch_begins_once_each_result_is_committed|joint_sent_relaxed|Causality violation'
  'loom_joint|an_epoch_begins_once_each_result_is_committed|joint_left_relaxed|Causality violation'
  'loom_joint|an_epoch_begins_once_each_result_is_committed|joint_sent_before_result|Causality violation'
  'loom_joint|an_epoch_begins_once_each_task_has_a_place_and_is_sent|joint_pending_relaxed|over a task of the one before'
  'loom_joint|an_epoch_begins_once_each_task_has_a_place_and_is_sent|joint_pending_load_relaxed|over a task of the one before'
  'loom_pool|counts_cover_the_memory_at_any_death|uncounted_before_punch|bytes are there'
)

RUN_LIMIT_S=600

case "${1:-}" in
  '') fast=0 LOOM_MAX_PREEMPTIONS=4 ;;
  # Optimising would take longer than it saves.
  --fast) fast=1 LOOM_MAX_PREEMPTIONS=3; export CARGO_PROFILE_LOOM_OPT_LEVEL=1 ;;
  *) echo "usage: $0 [--fast]" >&2; exit 2 ;;
esac
export LOOM_MAX_PREEMPTIONS
unset LOOM_LOG LOOM_MAX_BRANCHES LOOM_MAX_PERMUTATIONS LOOM_MAX_DURATION LOOM_CHECKPOINT_FILE
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
  tail -n 60 "$log" >&2
  echo "loom: FAILED: $*" >&2
  exit 1
}

# run CONFIGURATION FAULT ARGUMENTS...: the tests of one configuration, built in a directory of its own.
run() {
  local flags='--cfg ringloader_loom'
  [[ $1 == loom ]] || flags+=' --cfg ringloader_faults'
  CARGO_TARGET_DIR="target/$1" RUSTFLAGS="$flags" RINGLOADER_FAULT="$2" timeout "$RUN_LIMIT_S" \
    cargo test -p ringloader-core --profile loom "${@:3}" >"$log" 2>&1
}

models=0 executions=0
hold() {
  local binary passed found
  run "$1" '' --no-run "${BINARIES[@]/#/--test=}" || fail "$1 does not build"
  for binary in "${BINARIES[@]}"; do
    run "$1" '' --test "$binary" -- --nocapture --test-threads=1 || fail "$1: a model of $binary does not hold"
    passed=$(sed -nE 's/^test result: ok\. ([0-9]+) passed.*/\1/p' "$log")
    found=$(grep -cE 'model .*: [0-9]+ executions$' "$log" || true)
    ((${passed:-0} > 0 && found > 0)) || fail "$1: $binary ran no model"
    models=$((models + found))
    executions=$((executions + $(sed -nE 's/.*model .*: ([0-9]+) executions$/\1/p' "$log" | paste -sd+)))
  done
}

caught=0
catch() {
  local binary test fault reason status=0
  IFS='|' read -r binary test fault reason <<<"$1"
  run loom-faults "$fault" --test "$binary" -- --nocapture --exact "$test" || status=$?
  grep -q '^running 1 test$' "$log" || fail "$binary has no test $test"
  ((status != 0)) || fail "$test holds with $fault planted"
  ((status != 124)) || fail "$test with $fault planted has not ended in $RUN_LIMIT_S s"
  grep -qF "$reason" "$log" || fail "$test with $fault planted fails, but not with '$reason'"
  caught=$((caught + 1))
}

((fast)) || hold loom
hold loom-faults
for row in "${FAULTS[@]}"; do catch "$row"; done
((models > 0 && caught > 0)) || fail "nothing ran"
echo "loom: $models models hold ($executions executions, $LOOM_MAX_PREEMPTIONS preemptions), $caught planted faults caught"
