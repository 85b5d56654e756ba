"""Times Attnloom and the attention peers that PyTorch carries on one GPU in one run, and writes the ratio of each cell.

usage: peers_beside.py OUT.csv --attnloom build/attnloom --peers peers.py --commit ID
                       [--mode burst,sustained] [--pass forward,backward] [--hdim 64,128,256]
                       [--seqlen 512,...] [--backends cudnn,fa2] [--dtype bf16] [--target mma]

`--peers` is a script that is called as `peers.py OUT.csv --mode .. --pass fwd,bwd --hdim .. --seqlen .. --backends ..
--dtype ..` and writes the columns pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops. It needs PyTorch.

OUT.csv has one line a cell: mode,pass,d,mask,seqlen,ours,best_peer,peer,ratio,commit, with ours and peer in TFLOP/s. The
rows it was made from lie beside it in OUT-rows.csv. A peer that fails in a cell is left out of that cell; a cell that
Attnloom lacks is an error. Without a peer in a cell the ratio is empty.
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
    parser.add_argument("--backends", default="cudnn,fa2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--target", default="mma")
    return parser.parse_args()


def read_rows(lines):
    return [{name: row[name] for name in COLUMNS} for row in csv.DictReader(x for x in lines if not x.startswith("#"))]


def run_ours(args):
    command = [args.attnloom, "bench", "--grid", "paper", "--mode", args.mode, "--pass", args.passes, "--hdim",
               args.hdim, "--seqlen", args.seqlen, "--dtype", args.dtype, "--target", args.target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return read_rows(done.stdout.splitlines())


def run_peers(args):
    passes = ",".join(PASS[name] for name in args.passes.split(","))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "peers.csv")
        command = [sys.executable, args.peers, path, "--mode", args.mode, "--pass", passes, "--hdim", args.hdim,
                   "--seqlen", args.seqlen, "--backends", args.backends, "--dtype", args.dtype]
        subprocess.run(command, stdout=sys.stderr, check=True)
        with open(path, newline="") as file:
            return read_rows(file)


def cell_of(row):
    return row["mode"], row["pass"], int(row["hdim"]), int(row["causal"]), int(row["seqlen"])


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


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main():
    args = arguments()
    ours, peers = run_ours(args), run_peers(args)
    stem = args.out[:-4] if args.out.endswith(".csv") else args.out
    write(stem + "-rows.csv", COLUMNS, ([row[name] for name in COLUMNS] for row in ours + peers))
    merged = merge(ours, peers, args.commit)
    write(args.out, MERGED, merged)
    ratios = sorted(float(row[8]) for row in merged if row[8])
    if ratios:
        print(f"{len(merged)} cells, ratio to the best peer: least {ratios[0]:.3f}, median {ratios[len(ratios) // 2]:.3f}",
              file=sys.stderr)


if __name__ == "__main__":
    main()
