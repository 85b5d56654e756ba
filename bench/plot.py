"""Draws a grid that peers_beside.py wrote, rate against length, one panel per pass, mask and head dim; or what layers_beside.py
--memory wrote, bytes against length, one panel per layer.

usage: plot.py GRID.csv|MEMORY.csv [OUT.svg]        OUT is GRID.svg if it is not given; needs matplotlib

The same CSV gives the same picture, byte by byte with one version of matplotlib. Colours and lines are such that it can
be read on a white and on a dark page; the ground is transparent.
"""
import argparse
import csv

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of the backend)

GREY = "#808791"  # text and frames: contrast 3.7 on white, 5.2 on #0d1117
OURS, PEER = "#2f81f7", "#d9730d"
LINE = {"burst": "-", "sustained": "--"}
MARK = {"cudnn": "s", "fa2": "^", "fa3": "o"}
PEER_NAME = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}
PASS = {"fwd": "forward", "bwd": "backward"}
MASKS = ["full", "causal"]

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "attnloom",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 9,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid")
    parser.add_argument("out", nargs="?")
    args = parser.parse_args()
    args.out = args.out or args.grid.removesuffix(".csv") + ".svg"
    return args


def read_cells(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [{name: int(value) if name in ("d", "seqlen", "bytes") else value for name, value in row.items()} for row in rows]


def length_name(length):
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def present(cells, column, order):
    return [value for value in order if any(cell[column] == value for cell in cells)]


def draw_panel(axes, cells, lengths):
    place = {length: i for i, length in enumerate(lengths)}
    for mode, line in LINE.items():
        rows = sorted((cell for cell in cells if cell["mode"] == mode), key=lambda cell: cell["seqlen"])
        beside = [cell for cell in rows if cell["peer"]]
        axes.plot([place[cell["seqlen"]] for cell in beside], [float(cell["peer"]) for cell in beside], line,
                  color=PEER)
        for cell in beside:
            axes.plot(place[cell["seqlen"]], float(cell["peer"]), MARK.get(cell["best_peer"], "D"), color=PEER,
                      markersize=4)
        axes.plot([place[cell["seqlen"]] for cell in rows], [float(cell["ours"]) for cell in rows], line,
                  color=OURS)
    axes.set_xticks(range(len(lengths)),
                    [length_name(length) for length in lengths])
    axes.tick_params(length=0)


def draw_legend(figure, cells):
    line = plt.Line2D
    handles = [line([], [], color=OURS, label="Attnloom"), line([], [], color=PEER, label="best peer:")]
    handles += [line([], [], color=PEER, linestyle="", marker=MARK.get(name, "D"), markersize=4,
                     label=PEER_NAME.get(name, name))
                for name in sorted({cell["best_peer"] for cell in cells if cell["best_peer"]})]
    handles += [line([], [], color=GREY, linestyle=LINE[mode], label=mode) for mode in present(cells, "mode", LINE)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def draw(cells):
    heads = sorted({cell["d"] for cell in cells})
    lengths = sorted({cell["seqlen"] for cell in cells})
    lines = [(name, mask) for name in present(cells, "pass", PASS) for mask in present(cells, "mask", MASKS)]
    figure, panels = plt.subplots(len(lines), len(heads), squeeze=False, sharex=True, sharey="row",
                                  figsize=(3.1 * len(heads), 2.0 * len(lines) + 0.6), layout="constrained")
    for (name, mask), row in zip(lines, panels):
        for d, axes in zip(heads, row):
            draw_panel(axes, [cell for cell in cells if (cell["pass"], cell["mask"], cell["d"]) == (name, mask, d)],
                       lengths)
            axes.set_title(f"{PASS[name]}, {mask}, d = {d}")
        row[0].set_ylim(bottom=0)
        row[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("length")
    draw_legend(figure, cells)
    return figure


def draw_memory(cells):
    layers = list(dict.fromkeys(cell["layer"] for cell in cells))
    figure, panels = plt.subplots(1, len(layers), squeeze=False, sharey=True, figsize=(3.6 * len(layers), 2.6), layout="constrained")
    for layer, axes in zip(layers, panels[0]):
        for backend, colour in (("attnloom", OURS), ("math", PEER)):
            rows = sorted((cell["seqlen"], cell["bytes"] / 2**30) for cell in cells if (cell["layer"], cell["backend"]) == (layer, backend))
            axes.plot([length for length, _ in rows], [gib for _, gib in rows], "o-", color=colour, markersize=4)
        lengths = sorted({cell["seqlen"] for cell in cells})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [length_name(length) for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("length")
        axes.set_title(layer)
    panels[0][0].set_ylabel("GiB of the GPU's memory")
    line = plt.Line2D
    figure.legend(handles=[line([], [], color=OURS, label="Attnloom"), line([], [], color=PEER, label="plain matrix products")],
                  loc="outside upper center", ncols=2, frameon=False)
    return figure


def main():
    args = arguments()
    with plt.rc_context(STYLE):
        cells = read_cells(args.grid)
        if not cells:
            raise SystemExit(f"{args.grid} has no rows")
        (draw_memory if "bytes" in cells[0] else draw)(cells).savefig(args.out, transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
