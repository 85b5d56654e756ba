"""Times masks by the tiles that they visit, and FlexAttention beside them, on one GPU.

usage: sparse_beside.py OUT.csv --attnloom build/attnloom --commit ID [--masks window_1024,...] [--hdim 64,128]
                        [--seqlen 16384,65536] [--mode burst,sustained] [--pass forward] [--target hopper] [--flex]

bf16, batch 1, heads = 2048 / d. Documents have random lengths; random blocks are of 128 x 128, drawn for each head. OUT.csv
has one line a mask, head dim, length, pass and mode:

    mask,pass,d,seqlen,mode   the cell
    ms, dense_ms              Attnloom with the mask, and without one at the same shape in the same run
    share                     tiles of 128 x 128 elements with a visible one / all tiles, counted element by element, of all heads;
                              bigbird's by `attnloom why`, which knows its blocks exactly
    bar_ms,bar_ratio          1.15 * share * dense_ms + 0.010, and bar_ms / ms: 1 or more, the bar is met
    flex_ms,flex_ratio        FlexAttention and flex_ms / ms: above 1, Attnloom is faster; with --flex
    flex_prepare_ms           what making its block mask takes, which flex_ms does not count
    commit                    what was measured

Scores (alibi, softcap) visit all tiles and have no bar here.
"""
import argparse
import concurrent.futures
import os
import subprocess
import tempfile
import time

import numpy
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from layers_beside import time_launch
from peers_beside import bench, write

DEVICE = "cuda"
TILE = 128
HIDDEN = 2048
COLUMNS = ("mask pass d seqlen mode ms dense_ms share bar_ms bar_ratio flex_ms flex_ratio flex_prepare_ms commit").split()


def documents(count):
    """ids of `count` documents whose ends are drawn at random."""
    def make(seqlen, heads):
        ends = numpy.sort(numpy.random.default_rng(count).choice(seqlen - 1, count - 1, replace=False)) + 1
        return {"ids": numpy.searchsorted(ends, numpy.arange(seqlen), side="right").astype(numpy.int32)}
    return make


def blocks(percent):
    def make(seqlen, heads):
        size = (heads, seqlen // TILE, seqlen // TILE)
        return {"blk": numpy.random.default_rng(percent).random(size) < percent / 100}
    return make


def slopes(seqlen, heads):
    return {"slopes": (2.0 ** (-8 * (numpy.arange(heads) + 1) / heads)).astype(numpy.float32)}


def popcount(x):
    return sum((x >> i) & 1 for i in range(24))


IDS, BLK = "params={ids: i32[seq_k]}", "params={blk: bool[heads_q, ceil(seq_q/128), ceil(seq_k/128)]}"
# name: words of the problem; params, or None; what query q sees of keys k, given the params and a head; score of FlexAttention
MASKS = {
    "causal": ("causal", None, lambda q, k, p, h: k <= q),
    "window_1024": ("mask={causal & window(1023, 0)}", None, lambda q, k, p, h: (k <= q) & (q - k <= 1023)),
    "window_4096": ("mask={causal & window(4095, 0)}", None, lambda q, k, p, h: (k <= q) & (q - k <= 4095)),
    "prefix": ("mask={prefix(1024)}", None, lambda q, k, p, h: (k < 1024) | (k <= q)),
    "longformer": ("mask={longformer(512, 64)}", None, lambda q, k, p, h: ((q - k).abs() <= 512) | (q < 64) | (k < 64)),
    "dilated": ("mask={dilated(256, 4)}", None, lambda q, k, p, h: ((q - k).abs() <= 1024) & ((q - k) % 4 == 0)),
    "butterfly": ("mask={butterfly(128)}", None, lambda q, k, p, h: popcount((q // 128) ^ (k // 128)) <= 1),
    "bigbird": ("mask={bigbird(3, 2, 3, 7)}", None, None),
    "documents_8": (f"mask={{document(ids)}} {IDS}", documents(8), lambda q, k, p, h: p["ids"][q] == p["ids"][k]),
    "documents_64": (f"mask={{document(ids)}} {IDS}", documents(64), lambda q, k, p, h: p["ids"][q] == p["ids"][k]),
    "causal_documents_8": (f"mask={{causal & document(ids)}} {IDS}", documents(8), lambda q, k, p, h: (k <= q) & (p["ids"][q] == p["ids"][k])),
    "blocks_2": (f"mask={{blk[h, row/128, col/128]}} {BLK}", blocks(2), lambda q, k, p, h: p["blk"][h, q // 128, k // 128]),
    "blocks_10": (f"mask={{blk[h, row/128, col/128]}} {BLK}", blocks(10), lambda q, k, p, h: p["blk"][h, q // 128, k // 128]),
    "blocks_50": (f"mask={{blk[h, row/128, col/128]}} {BLK}", blocks(50), lambda q, k, p, h: p["blk"][h, q // 128, k // 128]),
    "alibi": ("score={alibi(slopes)} params={slopes: f32[heads_q]}", slopes, None),
    "softcap": ("score={softcap(30)}", None, None),
}
SPARSE = [name for name in MASKS if name not in ("causal", "prefix", "alibi", "softcap")]
BESIDE_FLEX = ["causal", "window_1024", "documents_8", "prefix", "alibi", "softcap", "blocks_10"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--attnloom", required=True, help="the program")
    parser.add_argument("--commit", required=True, help="what is measured, for the last column")
    parser.add_argument("--masks", help=f"default {','.join(SPARSE)}; with --flex {','.join(BESIDE_FLEX)}")
    parser.add_argument("--hdim", default="64,128")
    parser.add_argument("--seqlen", default="16384,65536", help="multiples of 128")
    parser.add_argument("--mode", default="burst,sustained")
    parser.add_argument("--pass", dest="passes", default="forward", help="forward, backward or both with a comma")
    parser.add_argument("--target", help="family of kernels (default: the best one for the device)")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; forward alone")
    return parser.parse_args()


def problem(name, hdim, passes):
    return f"bf16 d={hdim} {MASKS[name][0] if name else ''}{' backward' if 'backward' in passes else ''}"


def compile_all(args, names):
    """All kernels, many at a time, so that none is compiled while another is timed."""
    def one(text):
        command = [args.attnloom, "compile", text, "--alignment", "16"] + (["--target", args.target] if args.target else [])
        return subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    texts = [problem(name, hdim, args.passes) for hdim in args.hdim.split(",") for name in [None, *names]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, texts))


def share_of_tiles(name, seqlen, heads, params):
    visible, tiles = MASKS[name][2], seqlen // TILE
    if name == "bigbird":
        return None
    if "blk" in params:
        return float(params["blk"].float().mean())
    keys, filled = torch.arange(seqlen, device=DEVICE), 0
    for strip in keys.view(-1, TILE, 1):
        filled += int(visible(strip, keys, params, 0).view(TILE, -1, TILE).any(2).any(0).sum())
    return filled / tiles ** 2


def bigbird_share(args, seqlen):
    """By the program's own count of tiles, all of which it knows exactly: blocks of 64."""
    words = subprocess.run([args.attnloom, "why", problem("bigbird", 64, "forward"), "--target", "hopper", "--arch", "sm_90", "--schedule", "tile=128x128 stages=2",
                            "--shape", f"batch=1 heads=1 seq={seqlen}"], stdout=subprocess.PIPE, text=True, check=True).stdout
    visited = int(words.split("per head: visited ")[1].split()[0])
    return visited / (seqlen // TILE) ** 2


def ours(args, name, hdim, seqlen, files):
    rows = bench(args, problem(name, hdim, args.passes), "--shape", f"batch=1 heads={HIDDEN // hdim} seq={seqlen}", "--pass", args.passes,
                 *[word for key, path in files.items() for word in ("--param", f"{key}={path}")])
    return {(row["pass"], row["mode"]): float(row["ms"]) for row in rows}


torch._dynamo.config.cache_size_limit = 64  # one entry a mask, head dim and length
compiled_flex = torch.compile(flex_attention, dynamic=False)


def flex(args, name, hdim, seqlen, params):
    """{mode: ms} of FlexAttention, and the ms of its block mask."""
    heads, visible = HIDDEN // hdim, MASKS[name][2]
    q, k, v = (torch.randn(1, heads, seqlen, hdim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    mask, prepare_ms, score = None, 0.0, None
    if visible:
        def make():
            return create_block_mask(lambda b, h, row, key: visible(row, key, params, h), None, heads if "blk" in params else None, seqlen, seqlen,
                                     device=DEVICE)
        make()
        torch.cuda.synchronize()
        start = time.time()
        mask = make()
        torch.cuda.synchronize()
        prepare_ms = 1000 * (time.time() - start)
    if name == "alibi":
        score = lambda s, b, h, row, key: s - params["slopes"][h] * (row - key).abs()
    if name == "softcap":
        score = lambda s, b, h, row, key: 30 * torch.tanh(s / 30)
    launch = lambda: compiled_flex(q, k, v, score_mod=score, block_mask=mask)
    return {mode: time_launch(launch, mode) for mode in args.mode.split(",")}, prepare_ms


def main():
    args = arguments()
    names = args.masks.split(",") if args.masks else BESIDE_FLEX if args.flex else SPARSE
    compile_all(args, names)
    lines, shares = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for hdim in (int(d) for d in args.hdim.split(",")):
            for seqlen in (int(s) for s in args.seqlen.split(",")):
                dense = ours(args, None, hdim, seqlen, {})
                for name in names:
                    heads = HIDDEN // hdim
                    arrays = MASKS[name][1](seqlen, heads) if MASKS[name][1] else {}
                    files = {}
                    for key, array in arrays.items():
                        files[key] = os.path.join(folder, f"{name}-{key}.npy")
                        numpy.save(files[key], array)
                    params = {key: torch.from_numpy(array).to(DEVICE) for key, array in arrays.items()}
                    if (name, seqlen) not in shares:
                        shares[name, seqlen] = (bigbird_share(args, seqlen) if name == "bigbird" else
                                                share_of_tiles(name, seqlen, heads, params) if MASKS[name][2] else None)
                    share = shares[name, seqlen]
                    times = ours(args, name, hdim, seqlen, files)
                    others, prepare_ms = flex(args, name, hdim, seqlen, params) if args.flex else ({}, None)
                    for (which, mode), ms in times.items():
                        bar = 1.15 * share * dense[which, mode] + 0.010 if share else None
                        beside = others.get(mode)
                        lines.append([name, which, hdim, seqlen, mode, f"{ms:.5f}", f"{dense[which, mode]:.5f}", f"{share:.5f}" if share else "",
                                      f"{bar:.5f}" if bar else "", f"{bar / ms:.3f}" if bar else "", f"{beside:.5f}" if beside else "",
                                      f"{beside / ms:.3f}" if beside else "", f"{prepare_ms:.1f}" if beside else "", args.commit])
                        print(*lines[-1][:-1], flush=True)
                    write(args.out, COLUMNS, lines)


main()
