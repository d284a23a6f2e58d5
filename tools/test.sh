#!/usr/bin/env bash
# Sets the machine up (tools/setup.sh), then checks formatting and lints and runs every test. Arguments go to
# `cargo test`; with any, formatting and lints are left out:
#
#   tools/test.sh                       everything
#   tools/test.sh --lib pages           the unit tests whose name contains `pages`
#
# Ends with `N passed, N failed` (and `, N skipped`) and fails if anything did. Formatting, lints, the build and a test
# binary that ends without a result count as one failure each, and so does a trained model that cannot be fetched
# (tools/fetch_model.sh; KVPACK_MODEL names one that is there). KVPACK_ALLOW_NO_GPU=1 leaves out what needs an adapter.
set -u
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$KVPACK_ROOT" || exit 1

broken=0 # steps that failed, besides tests

step() {
    local start=$SECONDS
    printf '\n== %s\n' "$*"
    "$@" </dev/null && { printf '== ok, %d s\n' $((SECONDS - start)); return; }
    printf '== FAILED after %d s: %s\n' $((SECONDS - start)) "$*"
    broken=$((broken + 1))
}

# Prints the last line and leaves. $1 passed, $2 failed, $3 skipped.
finish() {
    local skipped=""
    [ "$3" = 0 ] || skipped=", $3 skipped"
    printf '\n%d passed, %d failed%s\n' "$1" "$2" "$skipped"
    [ "$2" = 0 ]
    exit
}

kvpack_setup test || finish 0 1 0

if [ $# = 0 ]; then
    step cargo fmt --check
    step cargo clippy --release --all-targets -- -D warnings
    step cargo clippy --release --no-default-features --lib -- -D warnings
    RUSTDOCFLAGS="-D warnings" step cargo doc --release --no-deps
fi

# The trained model, for the tests that need it: they are skipped where KVPACK_MODEL is not set. A fetch that fails is a failure.
if [ $# = 0 ] && [ -z "${KVPACK_MODEL:-}" ]; then
    if KVPACK_MODEL="$(tools/fetch_model.sh)"; then
        export KVPACK_MODEL
    else
        unset KVPACK_MODEL
        printf '\n== FAILED: tools/fetch_model.sh brought no model\n'
        broken=$((broken + 1))
    fi
fi

log="$(mktemp)" || finish 0 $((broken + 1)) 0
trap 'rm -f "$log"' EXIT
status=0

# Runs cargo test with the arguments after the first, which says on what; keeps a failing exit code.
run_tests() {
    printf '\n== cargo test --release --no-fail-fast %s (%s)\n' "${*:2}" "$1"
    cargo test --release --no-fail-fast "${@:2}" </dev/null 2>&1 | tee -a "$log"
    local result=${PIPESTATUS[0]}
    [ "$result" = 0 ] || status=$result
}

run_tests "${VK_DRIVER_FILES:-the system driver}" "$@"
if [ $# = 0 ]; then
    # The tests whose name contains `portable` again on every other driver at hand.
    if [ -n "${KVPACK_SWIFTSHADER_ICD:-}" ]; then
        VK_DRIVER_FILES=$KVPACK_SWIFTSHADER_ICD VK_ICD_FILENAMES=$KVPACK_SWIFTSHADER_ICD \
            run_tests SwiftShader --test suite portable
    else
        printf '\n== not run: the portable tests on SwiftShader, which is not at hand here\n'
    fi
    if [[ "${VK_DRIVER_FILES:-}" == */kvpack/mesa-* ]]; then
        (unset VK_DRIVER_FILES VK_ICD_FILENAMES; status=0; run_tests "the system driver" --test suite portable; exit "$status") ||
            status=$?
    fi
fi

# One `Running` or `Doc-tests` line a binary, one `test result:` line from each that lived to its end.
read -r passed failed skipped started ended < <(awk '
    { gsub(/\033\[[0-9;]*m/, "") }
    /^ +(Running|Doc-tests) / { started++ }
    /^kvpack: skipped / { skipped++ }
    /^test result: / {
        ended++
        for (i = 2; i <= NF; i++) {
            if ($i ~ /^passed/) passed += $(i - 1)
            if ($i ~ /^failed/) failed += $(i - 1)
            if ($i ~ /^ignored/) skipped += $(i - 1)
        }
    }
    END { print passed + 0, failed + 0, skipped + 0, started + 0, ended + 0 }' "$log")

if [ "$started" -gt "$ended" ]; then
    printf '\n== FAILED: %d test binaries ended without a result\n' $((started - ended))
    broken=$((broken + started - ended))
elif [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    printf '\n== FAILED: cargo test (exit code %d), see above\n' "$status"
    broken=$((broken + 1))
elif [ $# = 0 ] && [ $((passed + failed)) = 0 ]; then
    printf '\n== FAILED: no test ran\n'
    broken=$((broken + 1))
fi
finish "$passed" $((failed + broken)) "$skipped"
