"""Times every schedule that fits a problem, beside the cost the generator's model gives it.

usage: schedules.py OUT.csv --attnloom build/attnloom --commit ID [--arch sm_90] [--most 14]
                    [--shape "batch=8 heads=16 seq=2048"] PROBLEM ...

The forward of each problem is swept, and the backward where the problem has the word. Kernels are compiled first, in
parallel; then they are timed one after another in mode burst. Columns: problem,pass,schedule,cost,ms,tflops,commit.
"""
import argparse, csv, os, re, subprocess
from concurrent.futures import ThreadPoolExecutor

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("out")
ap.add_argument("problems", nargs="+")
ap.add_argument("--attnloom", required=True)
ap.add_argument("--commit", required=True)
ap.add_argument("--arch", default="sm_90")
ap.add_argument("--shape", default="batch=8 heads=16 seq=2048")
ap.add_argument("--most", type=int, default=14, help="candidates of a pass, cheapest by the model first")
a = ap.parse_args()


def attnloom(*words):
    return subprocess.run([a.attnloom, *words], check=True, capture_output=True, text=True).stdout


def candidates(problem):
    """(pass, schedule, cost) of what `attnloom why` does not refuse."""
    for name in ("forward", "backward") if " backward" in problem else ("forward",):
        why = attnloom("why", problem, "--target", "mma", "--arch", a.arch, "--pass", name)
        rows = [(name, m[1], int(m[2])) for m in re.finditer(r"^  (tile=.*?)  +cost (\d+)", why, re.M)]
        yield from sorted(rows, key=lambda r: r[2])[: a.most]


work = [(p, *row) for p in a.problems for row in candidates(p)]
with ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(lambda w: attnloom("compile", w[0], "--arch", a.arch, "--pass", w[1], "--schedule", w[2]), work))
with open(a.out, "w", newline="\n") as f:
    out = csv.writer(f, lineterminator="\n")
    out.writerow("problem pass schedule cost ms tflops commit".split())
    for problem, name, schedule, cost in work:
        text = attnloom("bench", problem, "--pass", name, "--schedule", schedule, "--shape", a.shape)
        row = next(csv.DictReader(text.splitlines()))
        out.writerow([problem, name, schedule, cost, row["ms"], row["tflops"], a.commit])
        f.flush()
