#!/usr/bin/env bash
# Sets the machine up (tools/setup.sh), builds, and prints the drift table. Arguments go to `kvpack drift`.
set -u
# shellcheck source=tools/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

kvpack_setup run || exit 1
# Not from the project's folder, so that file names among the arguments mean what they say.
exec cargo run --release --manifest-path "$KVPACK_ROOT/Cargo.toml" -- drift "$@"
