#!/usr/bin/env bash
# What is published: the source distribution and the wheel that is built from it.
#
#   ci/wheel.sh build TOOLS [ARGUMENTS]  both into build/dist; the arguments go to maturin: --target TRIPLE for another
#                                        machine. The wheel for macOS and Windows too, which is made of the Linux
#                                        wheel
#   ci/wheel.sh check TOOLS [--release]  what must hold of all that lies in build/dist; --release: it is to be
#                                        published
#   ci/wheel.sh run PYTHON [SITE]        a new environment of PYTHON runs the wheel, without cargo; torch comes
#                                        from SITE, a folder of packages, or from an index (TORCH_INDEX=<url>)
#
# DIST=<folder> is another one than build/dist.
#
# TOOLS is the bin folder of an environment with pyproject's group `wheel`. zig links against the oldest glibc
# that is supported, so that no container is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

GLIBC=manylinux_2_28
DIST=${DIST:-build/dist}

build() {
  local tools=$1 flags='' sources
  # Messages of panics name their source file: the crate's name, not this machine's folder.
  cargo fetch -q --locked
  for sources in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/; do
    flags+=" --remap-path-prefix=$sources="
  done
  # From the beginning: the files of a source distribution have one fixed time, so that cargo would take what
  # it built before for theirs.
  local target=target/wheel-${DIST##*/}
  rm -rf "$DIST" "$target"
  PATH="$(realpath "$tools"):$PATH" RUSTFLAGS="${flags# }" "$tools/maturin" build --release --locked --sdist --zig \
    --compatibility "$GLIBC" --target-dir "$target" --out "$DIST" "${@:2}"
  "$tools/python" ci/portable_wheel.py "$DIST"/*"$GLIBC"*.whl "$DIST"
}

check() {
  local tools=$1 wheel arch
  "$tools/python" ci/check_dist.py "$DIST" "${@:2}"
  "$tools/twine" check --strict "$DIST"/*
  for wheel in "$DIST"/*"$GLIBC"*.whl; do
    arch=${wheel##*"$GLIBC"_} arch=${arch%.whl}
    if [[ $arch != $(uname -m) ]]; then
      # Nothing is repaired for another machine. The tag says which symbols and libraries the wheel needs.
      "$tools/auditwheel" show "$wheel" | tee build/shown
      tr -s '\n ' ' ' <build/shown | grep -q "consistent with the following platform tag: \"${GLIBC}_$arch\"" ||
        { echo "wheel: $wheel needs more than ${GLIBC}_$arch" >&2; exit 1; }
      continue
    fi
    # Repairing fails where a symbol is newer than the platform, and copies in what the platform lacks.
    PATH="$(realpath "$tools"):$PATH" "$tools/auditwheel" repair --plat "${GLIBC}_$arch" -w build/repaired "$wheel" \
      >/dev/null 2>&1 || { "$tools/auditwheel" show "$wheel" >&2; exit 1; }
    if "$tools/python" -m zipfile -l "build/repaired/${wheel##*/}" | grep '\.libs/'; then
      echo "wheel: $wheel needs libraries that the platform lacks" >&2
      exit 1
    fi
    "$tools/auditwheel" show "$wheel"
    rm -rf build/repaired
  done
}

run() {
  local root=$PWD name venv packages
  name=$("$1" -c 'import sys; print(sys.version.split()[0] + sys.abiflags)')
  venv=$root/build/run/$name
  rm -rf "$venv"
  "$1" -m venv "$venv"
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
  local install=(install --no-index --no-deps --only-binary :all: --find-links "$DIST" ringloader)
  if [[ -n ${2:-} ]]; then
    # First: pip would take a ringloader that SITE has for this one.
    "${pip[@]}" "${install[@]}"
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir: with what that folder's own .pth files add. It comes after this environment's packages.
    echo "import site; site.addsitedir('$2')" >"$packages/torch.pth"
  else
    "${pip[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
    "${pip[@]}" install numpy
    "${pip[@]}" "${install[@]}"
    "${pip[@]}" check
  fi
  # Elsewhere: the sources must not be what is imported.
  (cd "$venv" && env -i HOME="$HOME" PATH="$venv/bin" "$venv/bin/python" "$root/ci/smoke.py")
  rm -rf "$venv"
}

case "${1:-}" in
  build | check | run) "$@" ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
