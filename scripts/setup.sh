# shellcheck shell=bash
# setup: what demo.sh and test.sh share: installs what is missing, builds, finds or fetches NVRTC. To be
# sourced by bash under `set -euo pipefail`. A step that fails says what was tried, shows the end of its log
# and exits 1.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build="$root/build"
logs="$build/logs"
mkdir -p "$logs"

say() { printf '== %s\n' "$*"; }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# quietly NAME COMMAND...: runs the command into a log of its own; only a failure shows it.
quietly() {
    local log="$logs/$1.log"
    shift
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 25 "$log" >&2
        die "failed: $* (whole log: $log)"
    fi
}

have_header() { printf '#include <%s>\n' "$1" | cc -E -x c - >/dev/null 2>&1; }

# install_packages PACKAGE...: Debian packages, as root or by sudo.
install_packages() {
    [ $# -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "missing, and there is no apt-get to install them: $*"
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "missing: $*; run as root: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing $*"
    # A failed update is no error yet: the lists at hand may do.
    ${as_root[@]+"${as_root[@]}"} apt-get -qq update >"$logs/apt-update.log" 2>&1 </dev/null || true
    ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install -y --no-install-recommends "$@" >"$logs/apt-install.log" 2>&1 </dev/null || {
        tail -n 5 "$logs/apt-update.log" "$logs/apt-install.log" >&2
        die "could not install $*: no network, or no such package here (logs: $logs)"
    }
}

setup_packages() {
    local missing=()
    command -v cc >/dev/null && have_header stdio.h || missing+=(build-essential)
    command -v cmake >/dev/null || missing+=(cmake)
    command -v ninja >/dev/null || missing+=(ninja-build)
    { have_header lua5.4/lua.h || have_header lua.h; } || missing+=(liblua5.4-dev)
    have_header xxhash.h || missing+=(libxxhash-dev)
    have_header cmocka.h || missing+=(libcmocka-dev)
    install_packages ${missing[@]+"${missing[@]}"}
}

# setup_build FOLDER [-DOPTION=...]...
setup_build() {
    local folder=$1
    shift
    say "building ${folder#"$root"/}"
    quietly "configure-$(basename "$folder")" cmake -S "$root" -B "$folder" -G Ninja "$@"
    quietly "build-$(basename "$folder")" cmake --build "$folder"
}

# Leaves an NVRTC that the library finds, or says that the CPU is all there is. Needs the built command line,
# which knows what is there: the newest NVRTC of the toolkit, the system or a wheel that the driver takes.
setup_nvrtc() {
    local facts wheel=nvidia-cuda-nvrtc folder # the newest; a driver of CUDA 12 takes no other major
    facts=$("$build/attnloom" info) || die "failed: $build/attnloom info"
    if grep -q '^nvrtc  *nvrtc ' <<<"$facts"; then return 0; fi
    if grep -q '^driver  *CUDA 12' <<<"$facts"; then wheel=nvidia-cuda-nvrtc-cu12; fi
    folder="$build/$wheel"
    if ! [ -d "$folder" ]; then
        # In a subshell: without pip or network the CPU still works.
        python3 -m pip --version >/dev/null 2>&1 || (install_packages python3-pip) || true
        say "fetching $wheel, NVIDIA's run-time compiler, into ${folder#"$root"/}"
        rm -rf "$folder.part"
        if ! python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$folder.part" "$wheel" \
            >"$logs/nvrtc.log" 2>&1 </dev/null; then
            tail -n 2 "$logs/nvrtc.log" >&2
            say "no NVRTC could be fetched: CUDA kernels are not compiled here, the CPU target works"
            return 0
        fi
        quietly nvrtc python3 -m zipfile -e "$folder.part/"*.whl "$folder.part"
        rm "$folder.part/"*.whl
        mv "$folder.part" "$folder"
    fi
    LOOM_NVRTC_DIR=$(find "$folder" -name 'libnvrtc.so.1?' -printf '%h')
    export LOOM_NVRTC_DIR
    say "NVRTC of ${folder#"$root"/}"
}
