#!/usr/bin/env bash
# Makes .venv: PyTorch, Triton where PyTorch came without it, and this package with its tools.
#
# Run it as often as you like: it does nothing while pyproject.toml, the constraints, this script and
# the place of the repository are as they were. A set-up that was interrupted starts from scratch.
#
#   scripts/setup.sh                       the first Python from 3.11 to 3.14 that it finds
#   PYTHON=python3.12 scripts/setup.sh     this one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
venv=$root/.venv
stamp=$root/.venv.stamp # what .venv was made from, once it is whole; "unfinished" until then
lock=$root/.venv.lock   # a link to the process id of the set-up that is running

say() { echo "set-up: $*" >&2; }
fail() {
  printf 'set-up: %s\n' "$@" >&2
  exit 1
}

key() { echo "$(cat pyproject.toml constraints*.txt scripts/setup.sh | cksum) $root"; }
stamped() { cat "$stamp" 2>/dev/null || true; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# .venv runs, and is of the Python that was asked for, if one was.
venv_runs() {
  local has
  has=$(version "$venv/bin/python") && { [ -z "${PYTHON:-}" ] || [ "$has" = "$(version "$PYTHON")" ]; }
}
is_done() { [ "$(stamped)" = "$(key)" ] && venv_runs; }

one_at_a_time() {
  local holder told=""
  until ln -s $$ "$lock" 2>/dev/null; do
    holder=$(readlink "$lock" || true)
    if [ -n "$holder" ] && ! kill -0 "$holder" 2>/dev/null; then
      rm -f "$lock" # whoever held it was killed
      continue
    fi
    [ -n "$told" ] || say "waiting for another set-up (process $holder)"
    told=yes
    sleep 1
  done
  trap 'rm -f "$lock"' EXIT
  trap 'exit 130' INT TERM
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    case $(version "$candidate" || true) in
      3.11 | 3.12 | 3.13 | 3.14) # those that PyTorch 2.13 has wheels for
        echo "$candidate"
        return
        ;;
    esac
  done
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python from 3.11 to 3.14"
  fail "no Python from 3.11 to 3.14 found (python3 is: $(python3 --version 2>&1 || true)). Install one" \
    "(Debian, Ubuntu: sudo apt install python3.12 python3.12-venv; macOS: brew install python@3.12)" \
    "or name one: make PYTHON=/path/to/python3.12 test"
}

make_venv() {
  local python
  if [ ! -e "$stamp" ] && [ -e "$venv" ]; then
    fail "$venv is there and was not made by this script: move or delete it, then run this again"
  fi
  # What was finished in this place and still runs is brought up to date; the rest is made afresh.
  case $(stamped) in
    *" $root") if venv_runs; then
      echo unfinished >"$stamp"
      return
    fi ;;
  esac
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module (Debian, Ubuntu: sudo apt install python$(version "$python")-venv)"
  say "making .venv with Python $(version "$python")"
  echo unfinished >"$stamp"
  rm -rf "$venv"
  "$python" -m venv "$venv"
}

pip_install() { # what pip warns of is shown if it fails
  local how=--quiet warnings=$venv/pip-warnings.txt
  [ ! -t 1 ] || how=--progress-bar=on # someone is watching
  "$venv/bin/python" -m pip install "$how" --disable-pip-version-check "$@" 2>"$warnings" || {
    cat "$warnings" >&2
    return 1
  }
}

has_triton() {
  "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("triton"))'
}
triton_has_a_wheel() { # Linux with glibc, on x86-64 and 64-bit ARM
  "$venv/bin/python" -c 'import platform as p, sys
sys.exit(not (p.libc_ver()[0] == "glibc" and p.machine() in ("x86_64", "aarch64")))'
}

if is_done; then exit 0; fi
one_at_a_time
if is_done; then exit 0; fi # by the one that we waited for
make_venv

# PyTorch goes first, alone and by its exact version: what is installed after it keeps the build that
# is there, where a range would let the installer look for a newer one.
say "installing PyTorch (the largest part: from half a minute to some minutes)"
pip_install -c constraints.txt "$(grep '^torch==' constraints.txt)"
if has_triton; then
  : # it came with PyTorch
elif triton_has_a_wheel; then
  say "installing Triton"
  pip_install -c constraints.txt -c constraints-triton.txt triton numpy
else
  say "there is no Triton for this machine: its tests will be skipped"
fi
say "installing headway and its tools"
pip_install -c constraints.txt -e ".[cli,dev,docs,hf,plot]"
# Beside the newest transformers its oldest supported version, for tests that put it first.
rm -rf "$venv/oldest"
pip_install --no-deps --target "$venv/oldest" -r constraints-transformers.txt

key >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done: .venv/bin/headway"
