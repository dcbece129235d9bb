#!/usr/bin/env bash
# Runs tests with the newest CPython at hand, in an environment of its own with the same torch.
#
#   ci/newer_python.sh ENVIRONMENT [PYTEST'S ARGUMENTS]
#
# ENVIRONMENT is that of `make test`, whose wheel is in build/wheels. What its Python has not compiled, and CUDA's
# libraries, come from there: only torch, numpy and hypothesis are installed again.
#
# NEWER_PYTHON=<path> is another interpreter than the newest one on PATH or of pyenv.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$1
shift
venv=$environment-newer

version() {
  # Nothing for what does not run, as pyenv's shims of versions that are not chosen, or makes no environments.
  "$1" -c 'import sys, ensurepip, venv; print(*sys.version_info[:3], sep=".")' 2>/dev/null || true
}

find_newest() {
  local minor candidate
  for minor in 15 14 13 12; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3."$minor"; do
      if [[ -n $(version "$candidate") ]]; then
        echo "$candidate"
        return
      fi
    done
  done
}

python=${NEWER_PYTHON:-$(find_newest)}
here=$(version "$environment/bin/python")
found=$([[ -z $python ]] || version "$python")
if [[ -z $found || $(printf '%s\n' "$here" "$found" | sort -V | tail -1) == "$here" ]]; then
  if [[ -n ${NEWER_PYTHON:-} ]]; then
    echo "newer-python: NEWER_PYTHON=$NEWER_PYTHON is no CPython newer than $here" >&2
    exit 1
  fi
  echo "newer-python: SKIPPED: there is no CPython newer than $here: NEWER_PYTHON=<path>" >&2
  exit 0
fi

packages_of() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

torch=$(cat "$environment/constraints.txt")
if [[ $(cat "$venv/.made-of" 2>/dev/null) != "$found $torch" ]]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
    ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check numpy hypothesis
  theirs=$(packages_of "$environment") ours=$(packages_of "$venv")
  # After this environment's own. torch finds CUDA's libraries beside itself.
  echo "$theirs" >"$ours/zz_others.pth"
  [[ ! -e $theirs/nvidia ]] || ln -s "$theirs/nvidia" "$ours/nvidia"
  echo "$found $torch" >"$venv/.made-of"
fi
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --force-reinstall build/wheels/*.whl
echo "newer-python: CPython $found"
"$venv/bin/python" -m pytest "$@"
