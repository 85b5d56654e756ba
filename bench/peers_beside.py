"""Times Attnloom and the attention peers that PyTorch carries on one GPU in one run, and writes the ratio of each cell.

usage: peers_beside.py OUT.csv --attnloom build/attnloom --peers peers.py --commit ID
                       [--mode burst,sustained] [--pass forward,backward] [--hdim 64,128,256]
                       [--seqlen 512,...] [--backends cudnn,fa2] [--dtype bf16] [--target hopper]
                       [--repeat 3] [--fa3 results/h200-fa3-table.csv] [--fa3-program ./fa3]

`--peers` is a script that is called as `peers.py OUT.csv --mode .. --pass fwd,bwd --hdim .. --seqlen .. --backends ..
--dtype ..` and writes the columns pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops. It needs PyTorch.

OUT.csv has one line a cell: mode,pass,d,mask,seqlen,ours,best_peer,peer,ratio,commit, with ours and peer in TFLOP/s. The
rows it was made from lie beside it in OUT-rows.csv, those of every backend. A peer that fails in a cell is left out of
that cell; a cell that Attnloom lacks is an error. Without a peer in a cell the ratio is empty.

With `--repeat N` Attnloom and the peers are timed in turns, N times each for one head dim after the other, and every
row is the median of its N.

cuDNN is timed in every run. With `--fa3-program ./fa3` (bf16; fa3.cu says how it is built) so is FlashAttention-3.
Without, it is not run: backend fa3 is its time in the table `--fa3` (columns
mode,pass,hdim,causal,seqlen,fa3_ms,cudnn_ms, bf16), times cuDNN's time here / cuDNN's time in the table. It is left out
of cells that cuDNN or the table lacks, and of all with `--fa3 ""`; the default table was measured on an H200.
"""
import argparse
import csv
import os
import subprocess
import sys
import tempfile

COLUMNS = "pass dtype hdim causal seqlen batch heads backend mode ms tflops".split()
MERGED = "mode pass d mask seqlen ours best_peer peer ratio commit".split()
PASS = {"forward": "fwd", "backward": "bwd"}
FA3_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "h200-fa3-table.csv")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--attnloom", required=True, help="the program")
    parser.add_argument("--peers", required=True, help="the script that times the peers")
    parser.add_argument("--commit", required=True, help="what is measured, for the last column")
    parser.add_argument("--mode", default="burst,sustained")
    parser.add_argument("--pass", dest="passes", default="forward,backward")
    parser.add_argument("--hdim", default="64,128,256")
    parser.add_argument("--seqlen", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--backends", default="cudnn,fa2", help="peers to run; cudnn is always one of them")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--target", help="family of kernels (default: the best one for the device)")
    parser.add_argument("--repeat", type=odd, default=1, help="odd: times that ours and the peers take turns")
    parser.add_argument("--fa3", default=FA3_TABLE, help="table of FlashAttention-3 and cuDNN; empty: none")
    parser.add_argument("--fa3-program", help="program that times FlashAttention-3, instead of the table")
    args = parser.parse_args()
    if args.fa3_program and args.dtype != "bf16":
        parser.error("--fa3-program needs --dtype bf16")
    if "cudnn" not in args.backends.split(","):
        args.backends = "cudnn," + args.backends
    return args


def odd(text):
    """A count that has a median."""
    number = int(text)
    if number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text} is not an odd number of times")
    return number


def read_table(lines):
    return csv.DictReader(line for line in lines if not line.startswith("#"))


def read_rows(lines):
    return [{name: row[name] for name in COLUMNS} for row in read_table(lines)]


def bench(args, *words):
    """The rows that `attnloom bench` prints."""
    command = [args.attnloom, "bench", *words, "--mode", args.mode]
    if args.target:
        command += ["--target", args.target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return read_rows(done.stdout.splitlines())


def run_ours(args, hdim):
    return bench(args, "--grid", "paper", "--pass", args.passes, "--hdim", hdim, "--seqlen", args.seqlen, "--dtype",
                 args.dtype)


def rows_written(args, hdim, command, *options, seqlen=None):
    """The rows that `command` writes to the file it is given; seqlen: instead of that of the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "peers.csv")
        subprocess.run([*command, path, "--mode", args.mode, "--hdim", hdim, "--seqlen", seqlen or args.seqlen, *options],
                       stdout=sys.stderr, check=True)
        with open(path, newline="") as file:
            return read_rows(file)


def run_peers(args, hdim):
    passes = ",".join(PASS[name] for name in args.passes.split(","))
    rows = rows_written(args, hdim, [sys.executable, args.peers], "--pass", passes, "--backends", args.backends, "--dtype",
                        args.dtype)
    return rows + rows_written(args, hdim, [args.fa3_program], "--pass", passes) if args.fa3_program else rows


def cell_of(row):
    return row["mode"], row["pass"], int(row["hdim"]), int(row["causal"]), int(row["seqlen"])


def medians(rows):
    """Of each cell and backend the row with the middle time."""
    turns = {}
    for row in rows:
        turns.setdefault((cell_of(row), row["backend"]), []).append(row)
    return [sorted(same, key=lambda row: float(row["ms"]))[len(same) // 2] for same in turns.values()]


def fa3_rows(peers, path):
    """FlashAttention-3 in the cells that cuDNN was timed in, scaled from the table."""
    with open(path, newline="") as file:
        table = {cell_of(row): (float(row["fa3_ms"]), float(row["cudnn_ms"])) for row in read_table(file)}
    scaled = []
    for row in peers:
        if row["backend"] == "cudnn" and row["dtype"] == "bf16" and cell_of(row) in table:
            fa3_ms, cudnn_ms = table[cell_of(row)]
            scaled.append({**row, "backend": "fa3", "ms": f"{float(row['ms']) * fa3_ms / cudnn_ms:.5f}",
                           "tflops": f"{float(row['tflops']) * cudnn_ms / fa3_ms:.1f}"})
    return scaled


def merge(ours, peers, commit):
    best = {}
    for row in peers:
        cell, rate = cell_of(row), float(row["tflops"])
        if cell not in best or rate > best[cell][1]:
            best[cell] = (row["backend"], rate)
    measured = {cell_of(row): float(row["tflops"]) for row in ours}
    missing = sorted(set(best) - set(measured))
    if missing:
        sys.exit(f"peers_beside.py: no figure of ours for {missing[0]} and {len(missing) - 1} more cells")
    merged = []
    for cell, rate in measured.items():
        mode, name, hdim, causal, seqlen = cell
        backend, peer = best.get(cell, ("", None))
        merged.append([mode, name, hdim, "causal" if causal else "full", seqlen, f"{rate:.1f}", backend,
                       "" if peer is None else f"{peer:.1f}", "" if peer is None else f"{rate / peer:.3f}", commit])
    return merged


def stem_of(path):
    return path[:-4] if path.endswith(".csv") else path


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main():
    args = arguments()
    ours, peers = [], []
    for hdim in args.hdim.split(","):
        for _ in range(args.repeat):
            ours += run_ours(args, hdim)
            peers += run_peers(args, hdim)
    ours, peers = medians(ours), medians(peers)
    if args.fa3 and not args.fa3_program:
        peers += fa3_rows(peers, args.fa3)
    write(stem_of(args.out) + "-rows.csv", COLUMNS, ([row[name] for name in COLUMNS] for row in ours + peers))
    merged = merge(ours, peers, args.commit)
    write(args.out, MERGED, merged)
    ratios = sorted(float(row[8]) for row in merged if row[8])
    if ratios:
        print(f"{len(merged)} cells, ratio to the best peer: least {ratios[0]:.3f}, median {ratios[len(ratios) // 2]:.3f}",
              file=sys.stderr)
    if args.fa3 or args.fa3_program:
        lacking = len(merged) - sum(row["backend"] == "fa3" for row in peers)
        print(f"cells without a figure of FlashAttention-3: {lacking}", file=sys.stderr)


if __name__ == "__main__":
    main()
