#!/usr/bin/env bash
# The core and the wheel for Linux on aarch64, from another machine.
#
#   ci/aarch64.sh wheel TOOLS   the wheel into build/dist-aarch64, checked; TOOLS as for ci/wheel.sh
#   ci/aarch64.sh core          the core's unit tests, in qemu's user mode
#   ci/aarch64.sh run [ROOT]    that wheel beside torch, in qemu's user mode. ROOT, or the variable AARCH64_ROOT, is a
#                               folder with the files of an aarch64 system, in which usr/bin/python3 has torch and numpy
#
# A machine that lacks a tool says which, and does nothing; with --require, as the first argument, that is an error.
#
# RUSTC names a compiler that has the target's standard library: of rustup (rustup target add aarch64-unknown-linux-gnu),
# or of Debian (libstd-rust-dev:arm64). QEMU names qemu's program.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=aarch64-unknown-linux-gnu
RUSTC=${RUSTC:-rustc}
QEMU=${QEMU:-qemu-aarch64}
CC=${CC_AARCH64:-aarch64-linux-gnu-gcc}
# The folder with the target's C library, as Debian's cross compiler has it.
LIBRARIES=${LIBRARIES:-/usr/aarch64-linux-gnu}
export RUSTC

# Unit tests that qemu's user mode cannot run, and why. It emulates system calls, not the kernel.
SKIPPED=(
  # It refuses MADV_REMOVE.
  punched_pages_are_given_back_and_read_as_zero
  the_last_page_goes_with_the_end
  parts_begin_and_end_with_pages_of_every_size
  # It measures how long a look takes, which emulation makes many times longer.
  does_not_sleep_beside_what_it_found
)

required=0
if [[ ${1:-} == --require ]]; then
  required=1
  shift
fi

lacks() {
  echo "aarch64: SKIPPED: $1" >&2
  exit "$required"
}

need_compiler() {
  local libraries
  libraries=$("$RUSTC" --print target-libdir --target "$TARGET")
  compgen -G "$libraries/libstd-*" >/dev/null ||
    lacks "$RUSTC has no standard library of $TARGET: rustup target add $TARGET, or Debian's rustc with libstd-rust-dev:arm64"
}

need_qemu() {
  local version
  command -v "$QEMU" >/dev/null || lacks "there is no $QEMU: apt install qemu-user"
  version=$("$QEMU" --version | sed -nE 's/^qemu-aarch64 version ([0-9]+).*/\1/p')
  # 7.2 takes all memory for terabytes of address space, and says that it did what it was advised; 11.1 runs the tests.
  ((${version:-0} > 7)) || lacks "$QEMU is of version ${version:-unknown}, which is too old"
}

wheel() {
  need_compiler
  export DIST=build/dist-aarch64
  ci/wheel.sh build "$1" --target "$TARGET"
  ci/wheel.sh check "$1"
}

core() {
  need_compiler
  command -v "$CC" >/dev/null || lacks "there is no $CC: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
  need_qemu
  CARGO_TARGET_DIR=target/aarch64 CARGO_PROFILE_TEST_OPT_LEVEL=1 \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$CC \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$QEMU -L $LIBRARIES" \
    cargo test -q -p ringloader-core --target "$TARGET" --lib -- --test-threads=2 "${SKIPPED[@]/#/--skip=}"
}

run() {
  local root=${1:-${AARCH64_ROOT:-}} packages python
  [[ -n $root && -x $root/usr/bin/python3 && $(realpath "$root") != / ]] || lacks "run: there is no aarch64 system with python3, torch and numpy: name its folder by AARCH64_ROOT"
  need_qemu
  compgen -G "build/dist-aarch64/*.whl" >/dev/null || lacks "run: there is no wheel in build/dist-aarch64"
  root=$(realpath "$root")
  python=$root/usr/bin/python-in-qemu packages=$root/usr/lib/python3/dist-packages
  # Called by its own name, so that a worker that Python starts by it is in qemu too.
  printf '#!/bin/sh\nPYTHONHOME=%s PYTHONNOUSERSITE=1 exec %s -L %s -0 %s %s "$@"\n' \
    "$root/usr" "$(command -v "$QEMU")" "$root" "$python" "$(realpath "$root/usr/bin/python3")" >"$python"
  chmod +x "$python"
  rm -rf "$packages"/ringloader*
  mkdir -p "$packages"
  unzip -q build/dist-aarch64/ringloader-*_aarch64.whl -d "$packages"
  # qemu takes no memory back (MADV_REMOVE), and ringloader says so.
  (cd "$root" && env -i HOME="$HOME" PATH=/usr/bin:/bin "$python" "$OLDPWD/ci/smoke.py")
}

case "${1:-}" in
  wheel | core | run) "$@" ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
