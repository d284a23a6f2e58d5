#!/usr/bin/env bash
# Checks kvpack on a real GPU and leaves all that a report needs in one folder, in under 10 minutes after the build.
#
#   tools/gpu_check.sh [--allow-software] [--adapter NAME] [FOLDER]        FOLDER: default ./gpu-check
#
# Runs $KVPACK_BIN, or target/release/kvpack (built first where it is missing and cargo is there). Installs nothing.
# Refuses a machine whose only adapters are software drivers, unless --allow-software. A step that fails or runs out of
# time does not stop the next ones. Exit: 0 all went well, 1 a step failed or no GPU, 2 usage.
set -u

usage() {
    echo "usage: tools/gpu_check.sh [--allow-software] [--adapter NAME] [FOLDER]" >&2
    exit 2
}

fail() {
    printf 'gpu_check: %s\n' "$*" >&2
    exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out=""
allow_software=no
adapter=()
while [ $# -gt 0 ]; do
    case "$1" in
        --allow-software) allow_software=yes ;;
        --adapter)
            [ $# -ge 2 ] || usage
            adapter=(--adapter "$2")
            shift
            ;;
        -*) usage ;;
        *)
            [ -z "$out" ] || usage
            out="$1"
            ;;
    esac
    shift
done
out="${out:-gpu-check}"

# ------------------------------------------------------------------------------------------------ the program

if [ -n "${KVPACK_BIN:-}" ]; then
    bin="$KVPACK_BIN"
    [ -x "$bin" ] || fail "KVPACK_BIN=$bin is not a program that can be run."
else
    target="${CARGO_TARGET_DIR:-$root/target}/release"
    bin="$target/kvpack"
    [ -x "$bin" ] || bin="$target/kvpack.exe"
    if [ ! -x "$bin" ]; then
        command -v cargo >/dev/null 2>&1 ||
            fail "there is no $target/kvpack and no cargo to build it. Set KVPACK_BIN to a prebuilt kvpack."
        echo "gpu_check: building kvpack (not counted in the 10 minutes) ..." >&2
        cargo build --release --manifest-path "$root/Cargo.toml" --bin kvpack || fail "the build failed."
        bin="$target/kvpack"
        [ -x "$bin" ] || bin="$target/kvpack.exe"
    fi
fi
case "$bin" in */*) bin="$(cd "$(dirname "$bin")" && pwd)/${bin##*/}" ;; esac

mkdir -p "$out" || fail "the folder $out cannot be made."
out="$(cd "$out" && pwd)"
[ -w "$out" ] || fail "the folder $out cannot be written."
# Results of an earlier run would pass for this one's.
rm -f "$out"/{vulkaninfo,nvidia-smi,system,info,validate,drift,drift-published}.{log,json} \
    "$out"/bench-{decode,tuned,gqa,mha,wide,append,prefill}.{log,json,svg} "$out"/tune.{log,json} "$out/tuning.json" "$out/summary.txt"

# What this user tuned before is left out: there is no such file until the tuner has run.
export KVPACK_TUNING="$out/tuning.json"

# ------------------------------------------------------------------------------------------------ steps

LIMIT=590 # seconds for all steps together
SECONDS=0
failures=0
table=""

# Runs a command for at most $1 seconds.
limited() {
    local seconds="$1" tool
    shift
    for tool in timeout gtimeout; do
        if command -v "$tool" >/dev/null 2>&1; then
            "$tool" -k 5 "$seconds" "$@"
            return
        fi
    done
    # macOS has neither. The alarm outlives exec and ends the program.
    perl -e 'alarm shift; exec @ARGV or exit 127' "$seconds" "$@"
}

# step NAME SECONDS required|optional COMMAND...: output to NAME.log, a line to the table. Returns the exit code.
step() {
    local name="$1" seconds="$2" kind="$3" start=$SECONDS code note=""
    shift 3
    if [ $((start + seconds)) -gt $LIMIT ]; then seconds=$((LIMIT - start)); fi
    if [ "$seconds" -le 0 ]; then
        code=124
        note="not run: out of time"
    else
        printf 'gpu_check: %s (at most %d s) ...\n' "$name" "$seconds" >&2
        {
            printf '$'
            printf ' %q' "$@"
            printf '\n'
        } >"$out/$name.log"
        limited "$seconds" "$@" </dev/null >>"$out/$name.log" 2>&1
        code=$?
        case $code in 124 | 137 | 142) note="ran longer than $seconds s" ;; esac
    fi
    if [ $code != 0 ] && [ "$kind" = required ]; then
        failures=$((failures + 1))
        note="${note:-see $name.log}"
    fi
    table="$table$(printf '%-16s %7d %9d  %s' "$name" $((SECONDS - start)) $code "$note")"$'\n'
    return $code
}

finish() {
    {
        printf '%-16s %7s %9s\n' step seconds 'exit code'
        printf '%s' "$table"
        printf '\n%s\n' "$1"
    } | tee "$out/summary.txt"
    echo "Results: $out"
    [ $failures = 0 ]
    exit
}

{
    date -u '+%Y-%m-%dT%H:%M:%SZ'
    uname -srm
    [ ! -r /etc/os-release ] || sed -n 's/^PRETTY_NAME=//p' /etc/os-release
    limited 10 "$bin" --version
    git -C "$root" rev-parse HEAD 2>/dev/null
} >"$out/system.log" 2>&1

if command -v vulkaninfo >/dev/null 2>&1; then step vulkaninfo 20 optional vulkaninfo --summary; fi
if command -v nvidia-smi >/dev/null 2>&1; then step nvidia-smi 20 optional nvidia-smi; fi

step info 30 required "$bin" info --json "$out/info.json"
types="$(grep -o '"device_type"[[:space:]]*:[[:space:]]*"[^"]*"' "$out/info.json" 2>/dev/null | sed 's/.*"\([^"]*\)"$/\1/')"
if [ -z "$types" ] && [ $allow_software = no ]; then
    failures=$((failures + 1))
    finish "REFUSED: no adapter found (info.log). Install the GPU's Vulkan driver, or use --allow-software."
fi
if ! printf '%s\n' "$types" | grep -vx 'Cpu' >/dev/null && [ $allow_software = no ]; then
    failures=$((failures + 1))
    finish "REFUSED: the only adapter is a software driver (info.json). Install the GPU's driver, or use --allow-software."
fi

# First, since nothing else counts where the kernels are wrong.
step validate 240 required "$bin" validate "${adapter[@]+"${adapter[@]}"}" --json "$out/validate.json"
step drift 60 required "$bin" drift --device gpu "${adapter[@]+"${adapter[@]}"}" --json "$out/drift.json"
step drift-published 60 required "$bin" drift --convention published --device gpu \
    "${adapter[@]+"${adapter[@]}"}" --json "$out/drift-published.json"

# bench NAME SECONDS ARGUMENTS...: rows with every sample and a picture beside the log.
bench() {
    local name="bench-$1" seconds="$2"
    shift 2
    step "$name" "$seconds" required "$bin" bench "$@" "${adapter[@]+"${adapter[@]}"}" \
        --json "$out/$name.json" --plot "$out/$name.svg"
}

some=f16,fp8,int8,int4,int4c/int4
if [ $allow_software = no ]; then
    bench decode 120 --batch 8 --context 4096,32768 --q-heads 32 --kv-heads 8 --head-dim 128
    step tune 120 required "$bin" tune --approximate --batch 8 --context 32768 --pairs $some,int2,fp4 --seconds 0.1 \
        "${adapter[@]+"${adapter[@]}"}" --json "$out/tune.json"
    bench tuned 60 --batch 8 --context 32768 --q-heads 32 --kv-heads 8 --head-dim 128
    bench gqa 40 --batch 8 --context 16384 --like llama-3-70b --pairs $some
    bench mha 40 --batch 4 --context 8192 --like llama-2-7b --pairs $some
    bench wide 40 --batch 8 --context 16384 --like gemma-2-9b --pairs $some
    bench append 40 append --batch 8
    bench prefill 40 prefill --batch 1 --context 512,4096 --pairs $some
else
    # Small: a software driver would take the whole time for one row.
    bench decode 60 --context 1024 --pairs f16,int4 --seconds 0.2
    step tune 60 required "$bin" tune --context 256 --q-heads 4 --kv-heads 2 --head-dim 32 --pairs int4 --seconds 0.01 \
        --memory 0.01 "${adapter[@]+"${adapter[@]}"}" --json "$out/tune.json"
    bench append 60 append --pairs f16,int4 --tokens 64 --seconds 0.2
fi

if [ $failures = 0 ]; then
    finish "All steps went well."
else
    finish "FAILED steps: $failures."
fi
