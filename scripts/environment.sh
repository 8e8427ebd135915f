# Sourced by the other scripts: the project's environment in .venv, made or completed when needed.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 2; }

# The CUDA extra of JAX that fits the NVIDIA driver, or nothing where there is none.
cuda_extra() {
    local driver
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)" || true
    [[ "$driver" =~ ^[0-9]+$ ]] || return 0
    if ((driver >= 580)); then echo cuda13; else echo cuda12; fi
}

make_environment() {
    local python="${PYTHON:-python3}" extra stamp="$root/.venv/.installed" wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || die "$python is not Python 3.11 or newer: set PYTHON to one that is"
    extra="$(cuda_extra)"
    wanted="$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum) $extra"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then return 0; fi
    say "installing into .venv (a few minutes the first time)${extra:+, JAX with $extra}"
    [[ -x "$root/.venv/bin/python" ]] || "$python" -m venv "$root/.venv" || die "cannot make .venv: is the venv module of $python installed?"
    "$root/.venv/bin/python" -m pip install --quiet --constraint "$root/scripts/constraints.txt" --editable "$root[dev${extra:+,$extra}]" 2>&1 |
        { grep -v -e '^WARNING' || true; } >&2
    "$root/.venv/bin/python" -c 'import torch, jax, flax, transformers, pytest' || die "installation failed: see above, then run this again"
    printf '%s' "$wanted" >"$stamp"
}

# JAX's GPU compiler, so that tests can compile for a GPU where there is none. It stays out of .venv:
# installed there, JAX would look for a GPU at every start and complain.
make_gpu_compiler() {
    local version folder="$root/.venv/gpu-compiler"
    [[ -z "$(cuda_extra)" ]] || return 0
    version="$("$root/.venv/bin/python" -c 'import jaxlib; print(jaxlib.__version__)')"
    if [[ -f "$folder/.installed" && "$(cat "$folder/.installed")" == "$version" ]]; then return 0; fi
    say "installing JAX's GPU compiler into .venv/gpu-compiler"
    rm -rf "$folder"
    if "$root/.venv/bin/python" -m pip install --quiet --no-deps --target "$folder" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" 2>/dev/null; then
        printf '%s' "$version" >"$folder/.installed"
    else
        say "there is none for this machine: tests that compile for a GPU will be skipped"
    fi
}
