"""Times layers outside the paper grid, Attnloom and other kernels in turns on one GPU, or measures their memory.

usage: layers_beside.py OUT.csv --attnloom build/attnloom --commit ID [--layers llama,window,gpt2,bert] [--seqlen 8192,...]
                        [--pass forward,backward] [--mode burst,sustained] [--repeat 3] [--target hopper]
                        [--fa3-program ./fa3]
       layers_beside.py OUT.csv --attnloom build/attnloom --commit ID --memory [--layers gpt2,bert] [--seqlen 1024,...]

All are bf16:

    llama     64 heads of q, 8 of k and v, d=128, batch 1, causal     lengths 2048 4096 8192 16384 32768
    window    the same, causal & window(1023, 0)                      lengths 8192 16384 32768
    gpt2      12 heads, d=64, batch 32, causal                        length 1024
    bert      16 heads, d=64, batch 64                                length 512

Peers are cuDNN, FlashAttention-2 and plain matrix products ("math") as PyTorch carries them, and for gpt2 and bert
FlashAttention-3 with `--fa3-program` (fa3.cu says how it is built); cuDNN gets a window nowhere in PyTorch. A peer that
fails, or whose output or gradients are not those of the mask, is left out and named on stderr. Attnloom and the peers
take turns at each cell, `--repeat` times; every figure is the median of its turns.

OUT.csv has one line a cell, pass and mode; the times it was made from lie beside it in OUT-rows.csv
(mode,pass,layer,seqlen,backend,ms).

    mode,pass,layer,d,heads,seqlen  the cell; heads is heads of q : heads of k and v; pass both: the sum of the two
    ours_ms,best_peer,peer_ms       milliseconds
    ratio                           peer_ms / ours_ms: above 1, Attnloom is faster
    math_ratio                      the same of plain matrix products
    dense_ms,causal_ms              Attnloom without mask and with `causal` alone, at the same shape in the same turns
    share                           tiles of 128 x 128 elements with a visible one / all tiles, counted element by element
    bar_ms,bar_ratio                1.15 * share * dense_ms + 0.010, and bar_ms / ours_ms: 1 or more, the bar is met
    commit                          what was measured

The columns from dense_ms to bar_ratio are filled for windows alone.

With `--memory` OUT.csv has the columns layer,seqlen,backend,bytes,commit: the most bytes of the device that one
sequence (batch 1) takes, inputs and gradients among them, forward and backward, of Attnloom and of math; a length that
math has no memory for is left out.
"""
import argparse
import re
import subprocess
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers_beside import bench, odd, rows_written, stem_of, write


class Layer(NamedTuple):
    d: int
    heads: int
    heads_kv: int
    batch: int
    mask: str
    lengths: list
    peers: list


LEFT = 1023  # keys before its own that a query sees in a window
LAYERS = {
    "llama": Layer(128, 64, 8, 1, "causal", [2048, 4096, 8192, 16384, 32768], ["cudnn", "fa2"]),
    "window": Layer(128, 64, 8, 1, f"mask={{causal & window({LEFT}, 0)}}", [8192, 16384, 32768], ["fa2"]),
    "gpt2": Layer(64, 12, 12, 32, "causal", [1024], ["cudnn", "fa2", "math"]),
    "bert": Layer(64, 16, 16, 64, "", [512], ["cudnn", "fa2", "math"]),
}
MEMORY_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
PASS = {"forward": "fwd", "backward": "bwd"}
NAME_OF = {short: name for name, short in PASS.items()}
DEVICE = "cuda"
TILE = 128
# Relative L2 against float32; bf16 has about 0.002, a window off by one key 0.012. What math rounds between its products counts too.
MAX_ERROR = {"cudnn": 0.006, "fa2": 0.006, "math": 0.03}
NUM_RUNS, NUM_WARM_UPS, IDLE_S, SUSTAINED_MS = 15, 4, 0.02, 300  # as `attnloom bench`
COLUMNS = ("mode pass layer d heads seqlen ours_ms best_peer peer_ms ratio math_ratio dense_ms causal_ms share bar_ms bar_ratio "
           "commit").split()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--attnloom", required=True, help="the program")
    parser.add_argument("--commit", required=True, help="what is measured, for the last column")
    parser.add_argument("--layers", default="llama,window,gpt2,bert")
    parser.add_argument("--seqlen", help="instead of the lengths above; multiples of 128")
    parser.add_argument("--pass", dest="passes", default="forward,backward")
    parser.add_argument("--mode", default="burst,sustained")
    parser.add_argument("--repeat", type=odd, default=3, help="odd: times that ours and the peers take turns")
    parser.add_argument("--target", help="family of kernels (default: the best one for the device)")
    parser.add_argument("--fa3-program", help="program that times FlashAttention-3")
    parser.add_argument("--memory", action="store_true", help="bytes instead of times")
    return parser.parse_args()


def visible(name, q, k):
    seen = k <= q if LAYERS[name].mask else torch.ones_like(k <= q)
    return seen & (q - k <= LEFT) if name == "window" else seen


def share_of_tiles(name, seqlen):
    keys = torch.arange(seqlen, device=DEVICE)
    filled = 0
    for strip in keys.view(-1, TILE, 1):
        seen = visible(name, strip, keys).view(TILE, -1, TILE)
        filled += int(seen.any(2).any(0).sum())
    return filled / (seqlen // TILE) ** 2


def make_tensors(layer, batch, seqlen):
    """q, k, v that want gradients, and dO: [batch, head, seq, dim], heads side by side in memory."""
    torch.manual_seed(0)
    made = [torch.randn(batch, seqlen, heads, layer.d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
            for heads in (layer.heads, layer.heads_kv, layer.heads_kv, layer.heads)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def attention(name, q, k, v):
    if name == "window":
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        return torch.ops.aten._flash_attention_forward(*rows, None, None, q.shape[2], k.shape[2], 0.0, False, False,
                                                       window_size_left=LEFT, window_size_right=0)[0].transpose(1, 2)
    layer = LAYERS[name]
    return F.scaled_dot_product_attention(q, k, v, is_causal=bool(layer.mask), enable_gqa=layer.heads != layer.heads_kv)


def gradients(o, inputs, dout):
    return torch.autograd.grad(o, inputs, dout, retain_graph=True)


def peer_launch(name, backend, pass_name, inputs, dout):
    """A launch of a pass. The kernels of a backward are those that its forward chose."""
    def forward():
        with sdpa_kernel(SDPA[backend]):
            return attention(name, *inputs)
    if pass_name == "forward":
        def launch():
            with torch.no_grad():
                forward()
        return launch
    o = forward()
    return lambda: gradients(o, inputs, dout)


def peers_that_run(name, passes):
    """The peers whose kernels run and give what the mask lets see."""
    layer, seqlen = LAYERS[name], 2 * (LEFT + 1)
    inputs, dout = make_tensors(layer, 1, seqlen)
    rows = torch.arange(seqlen, device=DEVICE)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    o = F.scaled_dot_product_attention(*exact, enable_gqa=layer.heads != layer.heads_kv,
                                       attn_mask=visible(name, rows[:, None], rows))
    wanted = [o] + (list(gradients(o, exact, dout.float())) if "backward" in passes else [])
    running = []
    for backend in layer.peers:
        try:
            with sdpa_kernel(SDPA[backend]):
                o = attention(name, *inputs)
                found = [o] + (list(gradients(o, inputs, dout)) if "backward" in passes else [])
            for what, x, y in zip(("o", "dq", "dk", "dv"), found, wanted):
                error = float((x - y).norm() / y.norm())
                if not error < MAX_ERROR[backend]:
                    raise RuntimeError(f"{what} has a relative error of {error:.3g}")
            running.append(backend)
        except RuntimeError as failure:
            print(f"{name}: {backend} left out: {str(failure).splitlines()[0]}", file=sys.stderr)
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


def problem_of(layer, mask, passes):
    return " ".join(f"bf16 d={layer.d} {mask} {'backward' if 'backward' in passes else ''}".split())


def shape_of(layer, batch, seqlen):
    return f"batch={batch} heads={layer.heads}:{layer.heads_kv} seq={seqlen}"


def fa3_rows(args, layer, seqlen):
    passes = ",".join(PASS[name] for name in args.passes.split(","))
    rows = rows_written(args, str(layer.d), [args.fa3_program], "--pass", passes, "--tokens", str(layer.batch * seqlen), "--hidden",
                        str(layer.heads * layer.d), seqlen=str(seqlen))
    return [row for row in rows if int(row["causal"]) == bool(layer.mask)]


def time_cell(args, name, seqlen, peers):
    """Median milliseconds by (backend, pass, mode)."""
    layer, passes, turns = LAYERS[name], args.passes.split(","), {}
    problems = {"ours": layer.mask}
    if name == "window":
        problems |= {"dense": "", "causal": "causal"}
    inputs, dout = make_tensors(layer, layer.batch, seqlen)

    def note(backend, pass_name, mode, ms):
        turns.setdefault((backend, pass_name, mode), []).append(float(ms))

    for _ in range(args.repeat):
        for backend, mask in problems.items():
            for row in bench(args, problem_of(layer, mask, passes), "--pass", args.passes, "--shape", shape_of(layer, layer.batch, seqlen)):
                note(backend, NAME_OF[row["pass"]], row["mode"], row["ms"])
        for backend in (peer for peer in peers if peer in SDPA):
            for pass_name in passes:
                launch = peer_launch(name, backend, pass_name, inputs, dout)
                for mode in args.mode.split(","):
                    note(backend, pass_name, mode, time_launch(launch, mode))
        for row in fa3_rows(args, layer, seqlen) if "fa3" in peers else []:
            note("fa3", NAME_OF[row["pass"]], row["mode"], row["ms"])
    times = {key: sorted(of_key)[len(of_key) // 2] for key, of_key in turns.items()}
    if len(passes) == 2:
        for backend, pass_name, mode in list(times):
            if pass_name == "forward":
                times[backend, "both", mode] = times[backend, "forward", mode] + times[backend, "backward", mode]
    return times


def line_of(args, name, seqlen, mode, pass_name, times, peers, share):
    layer, ours = LAYERS[name], times["ours", pass_name, mode]
    line = dict.fromkeys(COLUMNS, "")
    line |= {"mode": mode, "pass": pass_name, "layer": name, "d": layer.d, "heads": f"{layer.heads}:{layer.heads_kv}", "seqlen": seqlen,
             "ours_ms": f"{ours:.5f}", "commit": args.commit}
    if peers:
        best = min(peers, key=lambda backend: times[backend, pass_name, mode])
        peer = times[best, pass_name, mode]
        line |= {"best_peer": best, "peer_ms": f"{peer:.5f}", "ratio": f"{peer / ours:.3f}"}
    if "math" in peers:
        line["math_ratio"] = f"{times['math', pass_name, mode] / ours:.2f}"
    if name == "window":
        dense = times["dense", pass_name, mode]
        bar = 1.15 * share * dense + 0.010
        line |= {"dense_ms": f"{dense:.5f}", "causal_ms": f"{times['causal', pass_name, mode]:.5f}",
                 "share": f"{share:.5f}", "bar_ms": f"{bar:.5f}", "bar_ratio": f"{bar / ours:.3f}"}
    return line


def time_layers(args):
    lines, rows = [], []
    for name in args.layers.split(","):
        peers = peers_that_run(name, args.passes.split(","))
        if args.fa3_program and name in ("gpt2", "bert"):
            peers.append("fa3")
        for seqlen in map(int, args.seqlen.split(",")) if args.seqlen else LAYERS[name].lengths:
            share = share_of_tiles(name, seqlen) if name == "window" else None
            times = time_cell(args, name, seqlen, peers)
            rows += [[mode, pass_name, name, seqlen, backend, f"{ms:.5f}"] for (backend, pass_name, mode), ms in times.items()]
            for mode, pass_name in sorted({(mode, pass_name) for _, pass_name, mode in times}):
                lines.append(line_of(args, name, seqlen, mode, pass_name, times, peers, share))
                print(" ".join(f"{column}={value}" for column, value in lines[-1].items() if value), file=sys.stderr)
    write(stem_of(args.out) + "-rows.csv", "mode pass layer seqlen backend ms".split(), rows)
    write(args.out, COLUMNS, [line.values() for line in lines])


def our_bytes(args, layer, seqlen):
    command = [args.attnloom, "bench", problem_of(layer, layer.mask, ["backward"]), "--pass", "backward", "--memory", "--shape",
               shape_of(layer, 1, seqlen)]
    if args.target:
        command += ["--target", args.target]
    said = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes of the device", said)[1])


def math_bytes(name, seqlen):
    """None where memory does not suffice."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        inputs, dout = make_tensors(LAYERS[name], 1, seqlen)
        with sdpa_kernel(SDPA["math"]):
            gradients(attention(name, *inputs), inputs, dout)
        return torch.cuda.max_memory_allocated()
    except torch.cuda.OutOfMemoryError:
        return None


def measure_memory(args):
    lines = []
    for name in args.layers.split(","):
        for seqlen in map(int, args.seqlen.split(",")) if args.seqlen else MEMORY_LENGTHS:
            for backend, num in (("attnloom", our_bytes(args, LAYERS[name], seqlen)), ("math", math_bytes(name, seqlen))):
                if num is not None:
                    lines.append([name, seqlen, backend, num, args.commit])
                    print(*lines[-1], file=sys.stderr)
    write(args.out, "layer seqlen backend bytes commit".split(), lines)


def main():
    args = arguments()
    measure_memory(args) if args.memory else time_layers(args)


if __name__ == "__main__":
    main()
