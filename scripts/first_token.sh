#!/usr/bin/env bash
# How long from `git clone` to the first generated token, with nothing cached; then a second start.
set -euo pipefail
cd "$(dirname "$0")/.."
port=${PORT:-18055}
work=$(mktemp -d)
server=
# A process group of its own (set -m), so that make, what it runs and nothing else is stopped.
stop() {
    [ -n "$server" ] || return 0
    kill -INT -- "-$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    server=
}
trap 'stop; rm -rf "$work"' EXIT
export CLLM_CACHE_DIR="${CLLM_CACHE_DIR:-$work/cache}"

measure() {
    local what=$1 began=$EPOCHREALTIME body='{"prompt": "1+1=", "max_tokens": 1, "temperature": 0}' ended
    shift
    set -m
    "$@" >"$work/log" 2>&1 &
    server=$!
    set +m
    until curl -sf "127.0.0.1:$port/generate" -H 'Content-Type: application/json' -d "$body" >/dev/null; do
        kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
        sleep 0.1
    done
    ended=$EPOCHREALTIME
    stop
    awk -v a="$began" -v b="$ended" -v what="$what" 'BEGIN {printf "%s to first token: %.1f s\n", what, b - a}'
}

fresh() { git clone -q . "$work/clone" && exec make -C "$work/clone" serve ARGS="--port $port"; }
measure "fresh clone" fresh
measure "second start" make -C "$work/clone" serve ARGS="--port $port"
