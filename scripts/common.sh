# Sourced by the scripts beside it: the repository's root, the environment in .venv, sections.
#
#   SPARSE_KVCM_PYTHON  the interpreter that .venv is made with (default: python3)
#   SPARSE_KVCM_TORCH   what pip installs as torch, options included (default: torch==2.13.0)
set -euo pipefail

SCRIPT=scripts/$(basename "$0")
VENV=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv
JOBS=$(nproc)
cd "$(dirname "$VENV")"

die() {
  printf '%s: %s\n' "$SCRIPT" "$*" >&2
  exit 1
}

# section NAME COMMAND...: heading and time; if it fails, the script ends with the section's name.
# (Not `COMMAND || ...`, which would switch off errexit inside of it.)
SECTION=
trap 'status=$?; [[ $status == 0 || -z $SECTION ]] || printf "\n=== %s FAILED\n" "$SECTION"' EXIT
section() {
  local begin=$SECONDS
  SECTION=$1
  printf '\n=== %s\n' "$SECTION"
  "${@:2}"
  printf -- '--- %s: %d s\n' "$SECTION" $((SECONDS - begin))
  SECTION=
}

# install_system PACKAGE...: through apt when root, else says what to do.
install_system() {
  (($# > 0)) || return 0
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    die "missing system packages: $*. On Debian or Ubuntu: sudo apt-get install $*"
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# What pip cannot bring: a compiler, venv and Python's headers.
ensure_system() {
  PYTHON=${SPARSE_KVCM_PYTHON:-python3}
  local missing=()
  command -v c++ >/dev/null || missing+=(g++)
  if command -v "$PYTHON" >/dev/null; then
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || missing+=(python3-dev)
  else
    missing+=(python3 python3-venv python3-dev)
  fi
  install_system "${missing[@]}"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$PYTHON must be Python >= 3.10, is $("$PYTHON" --version 2>&1)"
}

# ensure_env run|test: .venv with scripts/requirements-*.txt, kept while they, torch and Python stay
# the same. Puts it first in PATH.
ensure_env() {
  local requirements=scripts/requirements-$1.txt torch=${SPARSE_KVCM_TORCH:-torch==2.13.0}
  local stamp=$VENV/.installed-$1 wanted
  ensure_system
  wanted=$({ cat scripts/requirements-*.txt && "$PYTHON" -VV && echo "$torch"; } | sha256sum)
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    "$PYTHON" -m venv "$VENV"
    # shellcheck disable=SC2086  # the variable may hold options
    "$VENV/bin/python" -m pip install --quiet $torch -r "$requirements"
    "$VENV/bin/python" -m pip install --quiet --no-deps -r scripts/requirements-alone.txt ||
      echo "NIXL cannot be installed here: what needs it is skipped" >&2
    echo "$wanted" >"$stamp"
  fi
  export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
}

# Builds the package with the tools that are there and installs it.
install_package() {
  python -m pip install --quiet --no-build-isolation --no-deps "$@" .
}
