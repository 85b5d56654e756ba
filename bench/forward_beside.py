"""Times forward cells outside the paper grid, Attnloom and PyTorch's kernels in turns on one GPU.

usage: forward_beside.py OUT.csv --attnloom build/attnloom --commit ID [--cells llama,window] [--seqlen 8192,...]
                         [--mode burst,sustained] [--repeat 3] [--target hopper]

All cells are bf16, d=128, batch 1, 64 heads of q and 8 of k and v (Llama-3-70B):

    llama     causal                       lengths 2048 4096 8192 16384 32768
    window    causal & window(1023, 0)     lengths 8192 16384 32768

Peers are cuDNN and FlashAttention-2 as PyTorch carries them; cuDNN gets a window nowhere in PyTorch. A peer that
fails, or whose result is not that of the mask, is left out and named on stderr. Attnloom and the peers take turns at
each cell, `--repeat` times; every figure is the median of its turns.

OUT.csv has one line a cell and mode; the times it was made from lie beside it in OUT-rows.csv
(mode,cells,seqlen,backend,ms).

    mode,cells,d,heads,seqlen     the cell; heads is heads of q : heads of k and v
    ours_ms,best_peer,peer_ms     milliseconds
    ratio                         peer_ms / ours_ms: above 1, Attnloom is faster
    dense_ms,causal_ms            Attnloom without mask and with `causal` alone, at the same shape in the same turns
    share                         tiles of 128 x 128 elements with a visible one / all tiles, counted element by element
    bar_ms,bar_ratio              1.15 * share * dense_ms + 0.010, and bar_ms / ours_ms: 1 or more, the bar is met
    commit                        what was measured

The columns from dense_ms to bar_ratio are filled for windows alone.
"""
import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers_beside import bench, odd, stem_of, write

HDIM, HEADS, HEADS_KV = 128, 64, 8
LEFT = 1023  # keys before its own that a query sees in a window
MASKED = {"llama": "causal", "window": f"mask={{causal & window({LEFT}, 0)}}"}
LENGTHS = {"llama": [2048, 4096, 8192, 16384, 32768], "window": [8192, 16384, 32768]}
PEERS = {"llama": ["cudnn", "fa2"], "window": ["fa2"]}
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
DEVICE = "cuda"
TILE = 128
MAX_ERROR = 0.006  # relative L2 against float32; bf16 has about 0.002, a window off by one key 0.012
NUM_RUNS, NUM_WARM_UPS, IDLE_S, SUSTAINED_MS = 15, 4, 0.02, 300  # as `attnloom bench`
COLUMNS = ("mode cells d heads seqlen ours_ms best_peer peer_ms ratio dense_ms causal_ms share bar_ms bar_ratio "
           "commit").split()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--attnloom", required=True, help="the program")
    parser.add_argument("--commit", required=True, help="what is measured, for the last column")
    parser.add_argument("--cells", default="llama,window")
    parser.add_argument("--seqlen", help="instead of the lengths above; multiples of 128")
    parser.add_argument("--mode", default="burst,sustained")
    parser.add_argument("--repeat", type=odd, default=3, help="odd: times that ours and the peers take turns")
    parser.add_argument("--target", help="family of kernels (default: the best one for the device)")
    return parser.parse_args()


def visible(cells, q, k):
    return (k <= q) & (q - k <= LEFT) if cells == "window" else k <= q


def share_of_tiles(cells, seqlen):
    keys = torch.arange(seqlen, device=DEVICE)
    filled = 0
    for strip in keys.view(-1, TILE, 1):
        seen = visible(cells, strip, keys).view(TILE, -1, TILE)
        filled += int(seen.any(2).any(0).sum())
    return filled / (seqlen // TILE) ** 2


def make_tensors(seqlen):
    torch.manual_seed(0)
    return [torch.randn(1, seqlen, heads, HDIM, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            for heads in (HEADS, HEADS_KV, HEADS_KV)]


def peer_launch(cells, q, k, v):
    """A launch of the attention of tensors [batch, head, seq, dim], under the kernel that sdpa_kernel allows."""
    if cells == "window":
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: torch.ops.aten._flash_attention_forward(
            *rows, None, None, q.shape[2], k.shape[2], 0.0, False, False,
            window_size_left=LEFT, window_size_right=0)[0].transpose(1, 2)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def peers_that_run(cells):
    """The peers whose kernel runs and sees the keys of the mask."""
    seqlen = 2 * (LEFT + 1)
    q, k, v = make_tensors(seqlen)
    rows = torch.arange(seqlen, device=DEVICE)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True,
                                            attn_mask=visible(cells, rows[:, None], rows))
    running = []
    for backend in PEERS[cells]:
        try:
            with sdpa_kernel(SDPA[backend]):
                error = float((peer_launch(cells, q, k, v)() - wanted).norm() / wanted.norm())
            if not error < MAX_ERROR:
                raise RuntimeError(f"relative error {error:.3g}")
            running.append(backend)
        except RuntimeError as failure:
            print(f"{cells}: {backend} left out: {str(failure).splitlines()[0]}", file=sys.stderr)
    return running


def launch_times(launch, num):
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num)]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_launch(launch, mode):
    """Milliseconds in one of the two protocols of `attnloom bench`."""
    warm_ups = NUM_WARM_UPS
    launch()
    torch.cuda.synchronize()
    if mode == "burst":
        time.sleep(IDLE_S)
    else:
        warm_ups = max(warm_ups, int(SUSTAINED_MS / max(launch_times(launch, 1)[0], 1e-3)))
    for _ in range(warm_ups):
        launch()
    return sorted(launch_times(launch, NUM_RUNS))[NUM_RUNS // 2]


def time_cell(args, cells, seqlen, peers):
    """Median milliseconds by (backend, mode)."""
    turns = {}
    problems = {"ours": MASKED[cells]}
    if cells == "window":
        problems |= {"dense": "", "causal": "causal"}
    tensors = make_tensors(seqlen)
    for _ in range(args.repeat):
        for backend, mask in problems.items():
            for row in bench(args, f"bf16 d={HDIM} {mask}".rstrip(), "--shape",
                             f"batch=1 heads={HEADS}:{HEADS_KV} seq={seqlen}"):
                turns.setdefault((backend, row["mode"]), []).append(float(row["ms"]))
        for backend in peers:
            launch = peer_launch(cells, *tensors)
            with sdpa_kernel(SDPA[backend]):
                for mode in args.mode.split(","):
                    turns.setdefault((backend, mode), []).append(time_launch(launch, mode))
    return {key: sorted(times)[len(times) // 2] for key, times in turns.items()}


def line_of(args, cells, seqlen, mode, times, peers, share):
    ours = times["ours", mode]
    line = dict.fromkeys(COLUMNS, "")
    line |= {"mode": mode, "cells": cells, "d": HDIM, "heads": f"{HEADS}:{HEADS_KV}", "seqlen": seqlen,
             "ours_ms": f"{ours:.5f}", "commit": args.commit}
    if peers:
        best = min(peers, key=lambda backend: times[backend, mode])
        line |= {"best_peer": best, "peer_ms": f"{times[best, mode]:.5f}", "ratio": f"{times[best, mode] / ours:.3f}"}
    if cells == "window":
        bar = 1.15 * share * times["dense", mode] + 0.010
        line |= {"dense_ms": f"{times['dense', mode]:.5f}", "causal_ms": f"{times['causal', mode]:.5f}",
                 "share": f"{share:.5f}", "bar_ms": f"{bar:.5f}", "bar_ratio": f"{bar / ours:.3f}"}
    return line


def main():
    args = arguments()
    lines, rows = [], []
    with torch.no_grad():
        for cells in args.cells.split(","):
            peers = peers_that_run(cells)
            for seqlen in map(int, args.seqlen.split(",")) if args.seqlen else LENGTHS[cells]:
                share = share_of_tiles(cells, seqlen) if cells == "window" else None
                times = time_cell(args, cells, seqlen, peers)
                rows += [[mode, cells, seqlen, backend, f"{ms:.5f}"] for (backend, mode), ms in times.items()]
                for mode in args.mode.split(","):
                    lines.append(line_of(args, cells, seqlen, mode, times, peers, share))
                    print(" ".join(f"{name}={value}" for name, value in lines[-1].items() if value), file=sys.stderr)
    write(stem_of(args.out) + "-rows.csv", "mode cells seqlen backend ms".split(), rows)
    write(args.out, COLUMNS, [line.values() for line in lines])


if __name__ == "__main__":
    main()
