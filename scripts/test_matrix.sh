#!/usr/bin/env bash
# Runs what depends on the versions of PyTorch and Triton with the oldest and the newest of them: the
# kernels of both GPU backends are compiled (no GPU is needed), launched on a stand-in, simulated, emulated.
# And what depends on the version of transformers with the oldest and the newest but one (the newest is
# the one of `make test`).
#
#   scripts/test_matrix.sh                        the oldest supported and the newest known ones
#   scripts/test_matrix.sh torch==2.12.1          this PyTorch
#   scripts/test_matrix.sh transformers==5.20.0   this transformers
#   scripts/test_matrix.sh --ptx main             runs no tests, but compares PTX with that commit (`make ptx`)
#
# Each has a virtual environment of its own in .venv.matrix, with the Triton that its PyTorch brings; they
# are large (5 GB: PyTorch's builds for CUDA) and are kept. PYTHON=... names the Python to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=""
if [ "${1:-}" = --ptx ]; then
  base=${2:?--ptx needs a commit}
  shift 2
fi
if [ $# -eq 0 ]; then
  set -- torch==2.11.0 torch==2.15.0 # with Triton 3.6 and 3.9
  [ -n "$base" ] || set -- "$@" transformers==5.17.0 transformers==5.23.0
fi
of_transformers=(tests/integrations/test_transformers.py tests/integrations/test_transformers_inside.py
  tests/nn/test_huggingface.py tests/distributed/test_models.py)
tests=(tests/hopper tests/tools/test_emulator.py tests/tools/test_sass.py tests/triton/test_compile.py tests/triton/test_emulated.py
  tests/triton/test_launch.py tests/triton/test_emit.py tests/triton/test_interpreter.py
  tests/triton/test_availability.py tests/test_first_use.py)
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
failed=()

for what in "$@"; do
  package=${what%%=*}
  venv=.venv.matrix/$what
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
  # PyTorch brings its Triton; of the other packages the versions that `make test` has.
  grep -v "^$package==" constraints.txt >"$venv/constraints.txt"
  torch=$what
  [ "$package" = torch ] || torch=$(grep '^torch==' constraints.txt)
  "${pip[@]}" install -c "$venv/constraints.txt" "$torch"
  if [ "$package" = transformers ]; then
    "${pip[@]}" install -c "$venv/constraints.txt" "$what" -e ".[cli,dev,hf]"
    echo "-- $what"
    "$venv/bin/python" -m pytest -q -n 2 --dist worksteal "${of_transformers[@]}" || failed+=("$what")
    continue
  fi
  "${pip[@]}" install -c "$venv/constraints.txt" -e ".[cli,dev]"
  "$venv/bin/python" - <<'PYTHON'
import torch, triton
from headway.backends import hopper
print(f"-- PyTorch {torch.__version__}, Triton {triton.__version__}: Hopper's kernels",
      hopper.wrong_triton() or "can be compiled", flush=True)
PYTHON
  if [ -n "$base" ]; then
    "$venv/bin/python" tests/tools/ptx_gate.py "$base" || failed+=("$what")
  else
    "$venv/bin/python" -m pytest -q -n 2 --dist worksteal "${tests[@]}" || failed+=("$what")
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}" >&2; exit 1; }
