"""tune_table: what `attnloom tune` printed, read from standard input, as CSV: a line a pass.

    attnloom tune bench/grid.lua --target hopper | tee tune.txt | python3 bench/tune_table.py > bench/results/<gpu>-tune.csv

seconds: of the tuning. candidates: schedules that fit, timed: those of them that were launched. best, ms: the fastest and its median.
model, model_ms: the schedule that a plan has without wisdom, and gap by how many percent it is slower. Errors: what is no output of
`attnloom tune` is refused with its line."""
import csv
import re
import sys

COLUMNS = ("problem", "pass", "target", "seqlen", "seconds", "candidates", "timed", "best", "ms", "model", "model_ms", "gap")
TRIAL = re.compile(r'rank (\S+) cost \S+ ms (\S+) gap \S+ launches (\d+) (\w+) schedule "([^"]*)"')
PASS = re.compile(r"pass (\w+) target (\w+) .* seq=(\d+):\d+ .* seconds (\S+)")


def passes(lines):
    found = None
    problem = ""
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\n")
        head, trial = PASS.fullmatch(line), TRIAL.match(line)
        if line.startswith("problem "):
            problem = line[len("problem "):]
        elif head:
            if found:
                yield found
            found = {"problem": problem, "pass": head[1], "target": head[2], "seqlen": head[3], "seconds": head[4], "trials": []}
        elif trial and found:
            found["trials"].append(trial.groups())
        elif line:
            sys.exit(f"line {number} is not of `attnloom tune`: {line}")
    if found:
        yield found


def row_of(found):
    trials = found["trials"]
    timed = [t for t in trials if t[1] != "-"]
    row = dict(found, candidates=len(trials), timed=len(timed), best="", ms="", model="", model_ms="", gap="")
    model = [t for t in trials if t[0] == "1"]
    best = [t for t in timed if t[3] == "timed"]
    if best:
        row.update(best=best[0][4], ms=best[0][1])
    if model:
        row.update(model=model[0][4], model_ms=model[0][1].strip("-"))
    if best and model and model[0][1] != "-":
        row["gap"] = f"{100 * (float(model[0][1]) / float(best[0][1]) - 1):.1f}"
    return row


writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
writer.writeheader()
for found in passes(sys.stdin):
    writer.writerow(row_of(found))
