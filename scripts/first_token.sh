#!/usr/bin/env bash
# How long from `git clone` to the first generated token, with nothing cached; then a second start.
set -euo pipefail
cd "$(dirname "$0")/.."
port=${PORT:-18055}
work=$(mktemp -d)
trap 'pkill -INT -f "cllm serve --port $port" || true; rm -rf "$work"' EXIT
export CLLM_CACHE_DIR="${CLLM_CACHE_DIR:-$work/cache}"

measure() {
    local began=$EPOCHREALTIME body='{"prompt": "1+1=", "max_tokens": 1, "temperature": 0}'
    "$@" >"$work/log" 2>&1 &
    local server=$!
    until curl -sf "127.0.0.1:$port/generate" -H 'Content-Type: application/json' -d "$body" >/dev/null; do
        kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
        sleep 0.1
    done
    awk -v a="$began" -v b="$EPOCHREALTIME" -v what="$what" 'BEGIN {printf "%s to first token: %.1f s\n", what, b - a}'
    pkill -INT -f "cllm serve --port $port"
    wait "$server" || true
}

fresh() { git clone -q . "$work/clone" && make -C "$work/clone" serve ARGS="--port $port"; }
what="fresh clone" measure fresh
what="second start" measure make -C "$work/clone" serve ARGS="--port $port"
