#!/usr/bin/env bash
# test: builds and runs every test, within 12 minutes on 2 cores; the last lines are ctest's summary and the
# exit status is ctest's. The host tests run once more under the address and undefined-behaviour sanitizers.
# GPU tests are shown as skipped where there is no GPU.
#
#     bash scripts/test.sh            as CI does: of the tests that take long every run does one part of PARTS
#     bash scripts/test.sh --all      all parts
#
# The part follows from the number of commits, so that every part has had its turn after PARTS commits.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

PARTS=64
# Numbers, not memory, are what these are about (and `emulate` changes stacks): under sanitizers they would take all the
# time there is. A few of their cases, label quick, stand for them there.
HEAVY='^(cases|emulate|numerics|properties|kernels|example_minilm)$'

part="$(($(git -C "$root" rev-list --count HEAD 2>/dev/null || echo 0) % PARTS))/$PARTS"
limit_s=600
if [ "${1:-}" = --all ]; then part=0/1 limit_s=36000; fi
export ATTNLOOM_TEST_PART=$part # read by the tests with label slow: part I of N

setup_packages
setup_build "$build"
setup_nvrtc
setup_build "$build/sanitize" -DATTNLOOM_SANITIZE=address,undefined

run_tests() { ctest --test-dir "$1" --output-on-failure --timeout $limit_s -j "$(nproc)" "${@:2}"; }

say "host tests under sanitizers"
sanitized=0
run_tests "$build/sanitize" -L 'host|quick' -E "$HEAVY" 2>&1 | tee "$logs/sanitize.log" || sanitized=1

say "all tests (of the slow ones part $part)"
status=0
run_tests "$build" -LE quick || status=$?
if [ $sanitized != 0 ]; then
    say "failures of the run under sanitizers"
    sed -n '/tests passed/,$p' "$logs/sanitize.log"
    [ $status != 0 ] || status=1
fi
exit $status
