#!/usr/bin/env bash
# Makes sure that cargo, a C linker and a Vulkan adapter are there, and chooses the driver. Used by run.sh and test.sh:
#
#   . tools/setup.sh; kvpack_setup run|test     sets up and exports the variables below into this shell
#   eval "$(tools/setup.sh)"                    the same for an interactive shell, before cargo by hand
#
# A machine with a GPU and a driver is left alone. Without one, on Debian and Ubuntu, the missing packages are printed
# as one command and, as root, installed. Where the system's Mesa is older than 24 (Debian 12), a newer one is unpacked
# into a cache folder and named to the Vulkan loader: it is much faster, and Dawn refuses the old one. Nothing of it
# touches the system.
#
# Read:     VK_DRIVER_FILES, VK_ICD_FILENAMES   a driver that you chose; it is used as it is
#           KVPACK_SYSTEM_DRIVER=1              use the system's driver, however old
#           KVPACK_ALLOW_NO_GPU=1               go on without any adapter
#           KVPACK_CHROMIUM                     the program of a Chromium or Chrome for the tests in a browser
#           XDG_CACHE_HOME                      where the cache folder `kvpack` lies (default ~/.cache)
# Exported: VK_DRIVER_FILES, VK_ICD_FILENAMES   the newer Mesa, when it is used
#           KVPACK_SWIFTSHADER_ICD              (test) a second software driver, when it is available
#           KVPACK_PYTHON                       (test) a Python with numpy and ml_dtypes
#           XDG_RUNTIME_DIR                     a private folder when unset, since Mesa prints an error without it
#
# Call kvpack_setup as `kvpack_setup ... || exit 1`: it is not written for `set -e`.
# Everything is said on stderr. Remove the folder `kvpack` of the cache to start afresh.

KVPACK_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
KVPACK_CACHE="${XDG_CACHE_HOME:-${HOME:-(no HOME)}/.cache}/kvpack"
KVPACK_OLDEST_MESA=24

kvpack_say() { printf 'kvpack: %s\n' "$*" >&2; }

kvpack_have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command with a time limit where `timeout` exists.
kvpack_limit() {
    local seconds="$1"
    shift
    if kvpack_have timeout; then timeout -k 5 "$seconds" "$@"; else "$@"; fi
}

# ---------------------------------------------------------------------------------------------- what is there

# A field of /etc/os-release, such as ID or VERSION_CODENAME.
kvpack_os() { (. /etc/os-release 2>/dev/null && eval "printf '%s' \"\${$1:-}\""); }

# Debian, Ubuntu and what derives from them.
kvpack_is_debian_like() {
    kvpack_have apt-get && kvpack_have dpkg || return 1
    case " $(kvpack_os ID) $(kvpack_os ID_LIKE) " in
        *" debian "* | *" ubuntu "*) return 0 ;;
        *) return 1 ;;
    esac
}

# Manifests of the installed Vulkan drivers, one a line.
kvpack_icds() {
    local dir file
    for dir in /etc/vulkan/icd.d /usr/share/vulkan/icd.d /usr/local/etc/vulkan/icd.d /usr/local/share/vulkan/icd.d \
        "${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}/vulkan/icd.d"; do
        for file in "$dir"/*.json; do
            [ -e "$file" ] && printf '%s\n' "$file"
        done
    done
    return 0
}

kvpack_have_loader() {
    local ldconfig=ldconfig
    kvpack_have ldconfig || ldconfig=/sbin/ldconfig
    if "$ldconfig" -p 2>/dev/null | grep 'libvulkan\.so\.1' >/dev/null; then return 0; fi
    compgen -G '/usr/lib*/libvulkan.so.1' >/dev/null || compgen -G '/usr/lib/*/libvulkan.so.1' >/dev/null
}

# Vulkan's own list of adapter types, one a line; empty where vulkaninfo is missing or finds none.
kvpack_adapter_types() {
    kvpack_have vulkaninfo || return 0
    kvpack_limit 60 vulkaninfo --summary 2>/dev/null | sed -n 's/.*deviceType *= *PHYSICAL_DEVICE_TYPE_//p'
}

# A GPU's device file: DRM render nodes, NVIDIA, WSL.
kvpack_have_gpu_node() {
    local node
    for node in /dev/dri/renderD* /dev/nvidia[0-9]* /dev/dxg; do
        [ -e "$node" ] && return 0
    done
    return 1
}

# True if a GPU can be used as the machine is. Mesa's package brings the manifests of Intel and AMD drivers to machines
# that have no GPU, so a manifest alone proves nothing: it takes Vulkan's answer or a device file as well.
kvpack_have_gpu() {
    if kvpack_have vulkaninfo; then
        kvpack_adapter_types | grep -v '^CPU' >/dev/null
    else
        kvpack_have_gpu_node && kvpack_have_loader && kvpack_icds | grep -v '/lvp_icd' >/dev/null
    fi
}

kvpack_have_software_driver() { kvpack_have_loader && kvpack_icds | grep '/lvp_icd' >/dev/null; }

# ---------------------------------------------------------------------------------------------- system packages

# Installs the named Debian packages: prints the command and, as root, runs it.
kvpack_apt_install() {
    local install="apt-get install -y --no-install-recommends $*"
    local command="$install" sudo_command="sudo $install"
    if ! compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; then
        command="apt-get update && $install"
        sudo_command="sudo apt-get update && sudo $install"
    fi
    if [ "$(id -u)" != 0 ]; then
        kvpack_say "missing: $*. Run this, then start again:"
        printf '\n    %s\n\n' "$sudo_command" >&2
        return 1
    fi
    kvpack_say "missing: $*. Running:  $command"
    export DEBIAN_FRONTEND="${DEBIAN_FRONTEND:-noninteractive}"
    sh -c "$command" </dev/null >&2 && return 0
    # Package lists that are some weeks old name files that no longer exist.
    kvpack_say "that failed; once more with fresh package lists."
    sh -c "apt-get update && $install" </dev/null >&2 && return 0
    kvpack_say "could not install $*: see apt's messages above."
    return 1
}

kvpack_need_cargo() {
    if ! kvpack_have cargo && [ -x "${CARGO_HOME:-${HOME:-}/.cargo}/bin/cargo" ]; then
        PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
        export PATH
    fi
    kvpack_have cargo && return 0
    kvpack_say "cargo is not installed. kvpack is written in Rust ($(kvpack_rust_version) or newer). Get it with"
    printf "\n    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y\n\n" >&2
    kvpack_say "or from https://rustup.rs, open a new shell, and start again."
    return 1
}

kvpack_rust_version() { sed -n 's/^rust-version *= *"\(.*\)".*/\1/p' "$KVPACK_ROOT/Cargo.toml"; }

# Makes sure that the system has what the given use (run or test) needs.
kvpack_need_system() {
    local use="$1" packages=""

    if [ "$(uname -s)" != Linux ]; then
        kvpack_say "on $(uname -s) nothing needs to be installed besides Rust: cargo run --release -- drift," \
            "cargo test --release. Not checked there by this project."
        return 0
    fi

    kvpack_have cc || packages="$packages gcc libc6-dev"
    if [ "$use" = test ]; then
        kvpack_have node || packages="$packages nodejs"
        kvpack_have npm || packages="$packages npm"
        # Checkers of exported shaders: SPIR-V, GLSL and HLSL.
        kvpack_have spirv-val || packages="$packages spirv-tools"
        kvpack_have glslangValidator || packages="$packages glslang-tools"
    fi
    if [ "$KVPACK_DRIVER" = none ]; then packages="$packages mesa-vulkan-drivers"; fi
    [ -n "$packages" ] || return 0

    # shellcheck disable=SC2086 # a list of names
    if kvpack_is_debian_like; then
        kvpack_apt_install ${packages# }
    else
        kvpack_say "this is not Debian or Ubuntu, so nothing is installed for you. Missing (Debian's names):$packages"
        if [ "$KVPACK_DRIVER" = none ]; then
            kvpack_say "a Vulkan driver: your GPU's own, or the software driver of Mesa (lavapipe):"
            kvpack_say "Fedora: dnf install mesa-vulkan-drivers vulkan-loader; Arch: pacman -S vulkan-swrast vulkan-icd-loader"
        fi
        return 1
    fi
}

# ---------------------------------------------------------------------------------------------- drivers in the cache

# apt-get with package lists, cache and sources of its own in folder $1; the system's are neither read nor changed.
# The system's settings (proxy, certificates) hold; its hooks and the lists of icons that desktops add do not.
kvpack_private_apt() {
    local dir="$1" hook
    shift
    if [ ! -e "$dir/apt.conf" ]; then
        mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/none"
        for hook in APT::Update::Pre-Invoke APT::Update::Post-Invoke APT::Update::Post-Invoke-Success \
            Acquire::IndexTargets::deb::DEP-11 Acquire::IndexTargets::deb::DEP-11-icons{,-small,-large,-hidpi,-large-hidpi}; do
            printf '#clear %s;\n' "$hook"
        done >"$dir/apt.conf"
        cat >>"$dir/apt.conf" <<CONF
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "$dir/none";
Dir::Etc::preferencesparts "$dir/none";
Dir::Etc::preferences "$dir/none/preferences";
Dir::State::lists "$dir/lists";
Dir::Cache "$dir/cache";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
CONF
        # Root's cache folder is closed to apt's own user.
        if [ "$(id -u)" = 0 ]; then echo 'APT::Sandbox::User "root";' >>"$dir/apt.conf"; fi
    fi
    (cd "$dir" && kvpack_limit 300 apt-get -q -c "$dir/apt.conf" "$@" </dev/null >>"$dir/log" 2>&1)
}

# The system's address of a Debian archive whose release is $1, or else $2.
kvpack_mirror() {
    local uri
    # shellcheck disable=SC2016 # apt's placeholders
    uri="$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Identifier: Packages' 2>/dev/null |
        awk -v release="$1" '$2 == release && $3 == "main" { print $1; exit }')"
    printf '%s' "${uri:-$2}"
}

# Writes the one line of a sources.list: archive $1, release $2.
kvpack_source_line() {
    local key
    for key in /usr/share/keyrings/debian-archive-keyring.gpg /usr/share/keyrings/debian-archive-keyring.pgp; do
        if [ -e "$key" ]; then
            printf 'deb [signed-by=%s] %s %s main\n' "$key" "$1" "$2"
            return
        fi
    done
    printf 'deb %s %s main\n' "$1" "$2"
}

# True if the library loads: every library and symbol that it needs is on this system.
kvpack_loads() {
    local lines
    lines="$(ldd -r "$1" 2>&1)" || return 1
    ! printf '%s' "$lines" | grep -qE 'not found|undefined symbol|symbol lookup error'
}

# Writes manifest $1 for library $2 of Vulkan version $3.
kvpack_write_icd() {
    printf '{\n  "file_format_version": "1.0.0",\n  "ICD": { "library_path": "%s", "api_version": "%s" }\n}\n' "$2" "$3" >"$1"
}

# The newest whole driver folder of the cache with name $1 and library $2. A damaged one is removed.
kvpack_cached() {
    local name="$1" library="$2" dir best=""
    for dir in "$KVPACK_CACHE/$name"-*; do
        [ -d "$dir" ] || continue
        if (cd "$dir" && sha256sum -c --status SHA256SUMS) 2>/dev/null && kvpack_loads "$dir/$library"; then
            best="$dir"
        else
            kvpack_say "$dir is damaged or does not load here; removing it."
            rm -rf "$dir" 2>/dev/null
        fi
    done
    [ -n "$best" ] && printf '%s' "$best"
}

# Downloads a Debian package and keeps two files of it, a library and a manifest, in a cache folder $name-VERSION that
# appears whole or not at all. Prints that folder.
#   $1 name   $2 package   $3 archive   $4 release   $5 the library's path in the package (a shell pattern)
kvpack_unpack() {
    local name="$1" package="$2" archive="$3" release="$4" pattern="$5"
    case "$KVPACK_CACHE" in
        /*) ;;
        *) kvpack_say "the cache folder $KVPACK_CACHE is not an absolute path."; return 1 ;;
    esac
    case "$KVPACK_CACHE" in
        *[\"\\:[:cntrl:]]*) kvpack_say "the cache folder $KVPACK_CACHE has characters that a driver list cannot hold."; return 1 ;;
    esac
    if ! mkdir -p "$KVPACK_CACHE" 2>/dev/null || [ ! -w "$KVPACK_CACHE" ]; then
        kvpack_say "the cache folder $KVPACK_CACHE cannot be written."
        return 1
    fi
    find "$KVPACK_CACHE" -maxdepth 1 -name '.tmp-*' -mmin +120 -exec rm -rf {} + 2>/dev/null # of runs that were killed

    # A subshell, so that its trap clears the scraps however it ends.
    (
        work="$(mktemp -d "$KVPACK_CACHE/.tmp-$name.XXXXXX")" || exit 1
        trap 'rm -rf "$work"' EXIT
        trap 'exit 130' INT TERM HUP
        kvpack_source_line "$archive" "$release" >"$work/sources.list"
        kvpack_say "downloading $package from $archive $release (once) ..."
        if ! kvpack_private_apt "$work" update || ! kvpack_private_apt "$work" download "$package/$release"; then
            kvpack_say "the download failed:"
            grep -E '^(E|W|Err)' "$work/log" | sort -u | tail -n 4 >&2
            exit 1
        fi
        deb="$(compgen -G "$work/$package"'_*.deb')" || exit 1
        version="$(dpkg-deb -f "$deb" Version)" || exit 1
        mkdir "$work/tree" "$work/new"
        dpkg -x "$deb" "$work/tree" || { kvpack_say "$package does not unpack."; exit 1; }

        library="$(compgen -G "$work/tree/$pattern")" || { kvpack_say "$package $version has no $pattern."; exit 1; }
        cp "$library" "$work/new/" || exit 1
        cp "$work/tree/usr/share/doc/$package/copyright" "$work/new/" 2>/dev/null
        kvpack_loads "$work/new/${library##*/}" || {
            kvpack_say "${library##*/} of $package $version does not load on this system."
            exit 1
        }
        final="$KVPACK_CACHE/$name-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.+-' '_')"
        # The loader trusts this number of the manifest, so take the package's own.
        api="$(cat "$work"/tree/usr/share/vulkan/icd.d/lvp_icd*.json "$work"/tree/usr/lib/chromium/*_icd.json 2>/dev/null |
            grep -o '"api_version": *"[0-9.]*"' | head -n 1 | grep -o '[0-9][0-9.]*')"
        kvpack_write_icd "$work/new/icd.json" "$final/${library##*/}" "${api:-1.1.0}" || exit 1
        (cd "$work/new" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS) || exit 1
        chmod -R u+rwX,go+rX,go-w "$work/new"
        # Another run may have been quicker: then its folder is as good.
        mv -T "$work/new" "$final" 2>/dev/null
        (cd "$final" && sha256sum -c --status SHA256SUMS) 2>/dev/null || { kvpack_say "$final is damaged."; exit 1; }
        printf '%s' "$final"
    )
}

# Major version of the system's Mesa package; empty if it cannot be told.
kvpack_system_mesa() {
    dpkg-query -W -f '${Version}\n' mesa-vulkan-drivers 2>/dev/null | sed -n '1s/^\([0-9]*:\)\{0,1\}\([0-9][0-9]*\)\..*/\2/p'
}

# Points the loader at a newer Mesa where the system's is old. Never fails: the old driver works, only slower.
kvpack_newer_mesa() {
    local major dir
    major="$(kvpack_system_mesa)"
    if [ -z "$major" ] || [ "$major" -ge "$KVPACK_OLDEST_MESA" ]; then return 0; fi
    if ! dir="$(kvpack_cached mesa libvulkan_lvp.so)"; then
        if [ "$(kvpack_os ID)-$(kvpack_os VERSION_CODENAME)" != debian-bookworm ]; then
            kvpack_say "Mesa $major of this system works but is slow, and Dawn refuses it; no newer one is known for it here."
            return 0
        fi
        if ! dir="$(kvpack_unpack mesa mesa-vulkan-drivers "$(kvpack_mirror bookworm http://deb.debian.org/debian)" \
            bookworm-backports 'usr/lib/*/libvulkan_lvp.so')"; then
            kvpack_say "no newer Mesa: going on with Mesa $major of the system, which works but is slower."
            return 0
        fi
    fi
    KVPACK_DRIVER="${dir##*/}"
    # Old and new name of the same setting; the loader takes the new one first.
    export VK_DRIVER_FILES="$dir/icd.json" VK_ICD_FILENAMES="$dir/icd.json"
}

# Sets KVPACK_SWIFTSHADER_ICD if SwiftShader can be had. Debian ships it inside Chromium: the one that is installed, or one
# that is unpacked into the cache. Never fails.
kvpack_swiftshader() {
    local codename dir installed=/usr/lib/chromium
    [ "$(uname -s)" = Linux ] || return 0
    if [ -n "${KVPACK_SWIFTSHADER_ICD:-}" ]; then return 0; fi
    if [ -e "$installed/vk_swiftshader_icd.json" ] && kvpack_loads "$installed/libvk_swiftshader.so"; then
        export KVPACK_SWIFTSHADER_ICD="$installed/vk_swiftshader_icd.json"
        return 0
    fi
    if ! dir="$(kvpack_cached swiftshader libvk_swiftshader.so)"; then
        codename="$(kvpack_os VERSION_CODENAME)"
        if [ "$(kvpack_os ID)" != debian ] || [ -z "$codename" ] || ! kvpack_have apt-get; then
            kvpack_say "SwiftShader, the second software driver of the tests, is fetched on Debian only: those tests are left out."
            return 0
        fi
        if ! dir="$(kvpack_unpack swiftshader chromium-common \
            "$(kvpack_mirror "$codename-security" http://deb.debian.org/debian-security)" \
            "$codename-security" 'usr/lib/chromium/libvk_swiftshader.so')"; then
            kvpack_say "no SwiftShader: the tests on a second software driver are left out."
            return 0
        fi
    fi
    export KVPACK_SWIFTSHADER_ICD="$dir/icd.json"
}

# ---------------------------------------------------------------------------------------------- browsers

# Installs Chromium where no browser of its kind is found. Never fails: the tests that need it do, with the command that
# mends it. Debian only: Ubuntu's package is an empty one that asks for snap.
kvpack_chromium() {
    local name
    [ "$(uname -s)" = Linux ] && [ -z "${KVPACK_CHROMIUM:-}" ] || return 0
    for name in chromium chromium-browser google-chrome; do
        if kvpack_have "$name"; then return 0; fi
    done
    if kvpack_is_debian_like && [ "$(kvpack_os ID)" != ubuntu ] && kvpack_apt_install chromium; then return 0; fi
    kvpack_say "no Chromium: the tests in a browser will fail. KVPACK_CHROMIUM may name the program of a Chromium or Chrome."
}

# Installs the npm packages of tools/browser where they are missing or not those of the lock file. Never fails: the tests
# that need them do, with the command that mends it.
kvpack_npm() {
    local dir="$KVPACK_ROOT/tools/browser" try
    local stamp="$dir/node_modules/.kvpack-lock.json"
    kvpack_have npm || return 0
    if cmp -s "$dir/package-lock.json" "$stamp" && [ -e "$dir/node_modules/webgpu/package.json" ]; then return 0; fi
    kvpack_say "installing the npm packages of tools/browser (about 150 MB) ..."
    for try in 1 2; do
        if npm ci --prefix "$dir" --no-audit --no-fund --loglevel=error </dev/null >&2; then
            cp "$dir/package-lock.json" "$stamp"
            return 0
        fi
        [ "$try" = 2 ] || sleep 3
    done
    kvpack_say "npm ci failed: the tests with Tint, Dawn and Chromium will fail."
}

# ---------------------------------------------------------------------------------------------- Python

# Sets KVPACK_PYTHON to a Python that has what tools/requirements.txt names: the system's, or one in the cache. Never
# fails: the tests that need it do, with the command that mends it.
kvpack_python() {
    local dir="$KVPACK_CACHE/python" test='import ml_dtypes, numpy; numpy.uint8(0).view(ml_dtypes.int2)' python
    if [ -n "${KVPACK_PYTHON:-}" ]; then return 0; fi
    for python in python3 "$dir/bin/python"; do
        if "$python" -c "$test" 2>/dev/null; then
            export KVPACK_PYTHON="$python"
            return 0
        fi
    done
    if ! kvpack_have python3 || ! python3 -c 'import ensurepip' 2>/dev/null; then
        kvpack_is_debian_like && kvpack_apt_install python3 python3-venv
    fi
    kvpack_say "installing numpy and ml_dtypes into $dir (once) ..."
    rm -rf "$dir"
    if python3 -m venv "$dir" >&2 && "$dir/bin/python" -m pip -q install -r "$KVPACK_ROOT/tools/requirements.txt" </dev/null >&2; then
        export KVPACK_PYTHON="$dir/bin/python"
    else
        kvpack_say "that failed: the tests that read golden vectors with Python will fail."
    fi
}

# ---------------------------------------------------------------------------------------------- all of it

# A folder of our own for XDG_RUNTIME_DIR.
kvpack_runtime_dir() {
    [ "$(uname -s)" = Linux ] || return 0
    if [ -n "${XDG_RUNTIME_DIR:-}" ]; then return 0; fi
    local dir
    dir="${TMPDIR:-/tmp}/kvpack-runtime-$(id -u)"
    mkdir -m 700 "$dir" 2>/dev/null
    if [ -L "$dir" ] || [ ! -d "$dir" ] || [ ! -O "$dir" ]; then dir="$(mktemp -d)" || return 0; fi
    export XDG_RUNTIME_DIR="$dir"
}

# $1: run or test. Returns non-zero, with a message, where the machine lacks something that could not be installed.
# KVPACK_DRIVER says what was chosen: gpu, named, software, mesa-VERSION, other, none.
kvpack_setup() {
    local use="${1:-run}" nodes=no
    kvpack_runtime_dir
    kvpack_need_cargo || return 1

    KVPACK_DRIVER=none
    if [ "$(uname -s)" != Linux ]; then
        KVPACK_DRIVER=other
    elif [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ]; then
        KVPACK_DRIVER=named
    elif kvpack_have_gpu; then
        KVPACK_DRIVER=gpu
    elif kvpack_have_software_driver; then
        KVPACK_DRIVER=software
    elif [ -n "$(kvpack_adapter_types)" ]; then
        KVPACK_DRIVER=other
    elif [ "${KVPACK_ALLOW_NO_GPU:-}" = 1 ]; then
        KVPACK_DRIVER=absent
        kvpack_say "no Vulkan driver, and KVPACK_ALLOW_NO_GPU=1: going on without."
    fi

    case "$KVPACK_DRIVER" in
        none | software)
            kvpack_have_gpu_node && nodes=yes
            if [ "$nodes" = yes ]; then
                kvpack_say "a GPU seems to be here, but no Vulkan driver for it: using the software driver."
            fi
            ;;
    esac
    kvpack_need_system "$use" || return 1
    if [ "$KVPACK_DRIVER" = none ]; then
        KVPACK_DRIVER=software
        if kvpack_have_gpu; then KVPACK_DRIVER=gpu; fi
    fi
    if [ "$KVPACK_DRIVER" = software ] && [ "${KVPACK_SYSTEM_DRIVER:-}" != 1 ]; then kvpack_newer_mesa; fi

    if [ "$use" = test ]; then
        kvpack_chromium
        kvpack_swiftshader
        kvpack_npm
        kvpack_python
    fi
    case "$KVPACK_DRIVER" in
        gpu | other | absent) ;;
        named) kvpack_say "driver: ${VK_DRIVER_FILES:-$VK_ICD_FILENAMES} (your choice)" ;;
        software) kvpack_say "driver: the system's software driver" ;;
        *) kvpack_say "driver: $VK_DRIVER_FILES" ;;
    esac
    return 0
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -u
    kvpack_setup "${1:-test}" || exit 1
    for name in PATH XDG_RUNTIME_DIR VK_DRIVER_FILES VK_ICD_FILENAMES KVPACK_SWIFTSHADER_ICD KVPACK_PYTHON; do
        [ -n "${!name:-}" ] && printf 'export %s=%q\n' "$name" "${!name}"
    done
    exit 0
fi
