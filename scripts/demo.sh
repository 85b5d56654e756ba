#!/usr/bin/env bash
# demo: from a fresh clone to attention of a real language model, computed by kernels that are generated,
# compiled, cached and launched in front of you: on the GPU if there is one, else on the CPU. May be run again
# at any time.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup_packages
setup_build "$build" -DCMAKE_BUILD_TYPE=Release
setup_nvrtc

export LOOM_CACHE_DIR="$build/demo-cache"
rm -rf "$LOOM_CACHE_DIR"
say "first run: nothing is cached"
"$build/examples/minilm" "$root/examples/data"
say "second run: the kernels come from the cache"
"$build/examples/minilm" "$root/examples/data"
