"""Figure 2 of the paper: how diversity collapses, and how the size of the model affects when runs collapse.

    python -m experiments.loopguard.figure2 FOLDER ... --work DIR [--base-run RUN] [--out figures]

Each FOLDER is the output of `python -m experiments.train_bundled --size SIZE --out FOLDER`; the model in the package is
the largest model and always included. Every model continues LoopBench's small prompts greedily (`sinkscope bench
--task loops --methods full`). Runs are kept in DIR, and a second call resumes; `--base-run` uses an existing run of the
model in the package.

(a) Type-token ratio of the last W = 256 tokens (of all tokens before step 256) over the first 1,000 steps, with the
collapse point, which is the first step from which the ratio stays below 0.2. The control is ordinary text in the same
tokens. (b) Share of runs that have not collapsed by a step, for W = 256 and for W = 64. Only whole windows count, so
no run can collapse before step W.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.drawn import powers, save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.bench.run import run_bench
from sinkscope.display.console import ProgressBar, note
from sinkscope.display.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of
from sinkscope.errors import SinkscopeError
from sinkscope.loops.signals import THETA_TTR, WINDOW
from sinkscope.models.text import typical_text
from sinkscope.opening.load import load

WINDOWS = (WINDOW, 64)
CURVES, FIRST, SHOWN = 8, 16, 1000  # (a): runs, first and last step that are drawn
COLOURS = (RED, ORANGE, BLUE, GREEN)


def trained(folder: Path) -> Row:
    """How a member of the family came about."""
    about = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    log = []
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        log.append(json.loads(line))
    losses = []
    for row in log:
        if "valid_loss" in row:
            losses.append(row["valid_loss"])
    s = about["settings"]
    validation_loss = None
    if losses:
        validation_loss = losses[-1]
    return {
        "layers": s["n_layers"],
        "width": s["d_model"],
        "steps": about["step"],
        "seed": s["seed"],
        "validation_loss": validation_loss,
        "versions": about["versions"],
    }


def runs_of(model: Any, folder: Path, new: int, batch_size: int, progress: ProgressBar) -> list[BenchRecord]:
    """The model's continuations of the small set, from the folder where they are there already."""
    return run_bench(model, "loops", ["full"], out=folder, max_new_tokens=new, batch_size=batch_size, progress=progress)


def diversity(ids: Sequence[int], window: int = WINDOW) -> list[float]:
    """Type-token ratio of the last `window` tokens at every step; shorter windows at first."""
    rows = []
    for step in range(1, len(ids) + 1):
        rows.append(len(set(ids[max(0, step - window) : step])) / min(step, window))
    return rows


def collapse_point(ids: Sequence[int], window: int = WINDOW, theta: float = THETA_TTR) -> int | None:
    """First step from which that ratio stays below `theta` to the end; None if there is none.

    Only full windows count, so it is at least `window`; the repetition itself began up to `window` tokens earlier.
    """
    values = diversity(ids, window)
    step = len(values)
    while step >= window and values[step - 1] < theta:
        step -= 1
    first_low = max(step + 1, window)
    if first_low > len(values):
        return None
    return first_low


def full_runs(folder: Path) -> list[BenchRecord]:
    """Records of method "full"."""
    found = []
    for r in read_run(folder):
        if r.method == "full":
            found.append(r)
    if not found:
        raise SinkscopeError(f"{folder.name} has no runs of the method full")
    return found


def survived(runs: Sequence[BenchRecord], window: int, cap: int) -> Row:
    """Collapse points and the share of runs without one by each step."""
    points = []
    for r in runs:
        points.append(collapse_point(r.tokens, window))
    steps = sorted({*range(0, min(cap, 640), 16), *range(0, cap + 1, 50), cap})
    known = []
    for p in points:
        if p is not None:
            known.append(p)
    median = None
    if known:
        median = statistics.median(known)
    survival = []
    for step in steps:
        counts = []
        for each in points:
            counts.append(each is None or each > step)
        survival.append(round(sum(counts) / len(points), 4))
    return {
        "window": window,
        "points": points,
        "collapsed": len(known) / len(points),
        "median": median,
        "steps": steps,
        "survival": survival,
    }


def curve(ids: Sequence[int]) -> Row:
    """Diversity at every fourth step; windows are shorter before step W."""
    values = diversity(ids)
    steps = list(range(FIRST, min(len(values), SHOWN) + 1, 4))
    ttr = []
    for s in steps:
        ttr.append(round(values[s - 1], 4))
    return {"steps": steps, "ttr": ttr, "collapse": collapse_point(ids)}


def measure(members: dict[str, tuple[Row, list[BenchRecord]]], base: str, ordinary: list[int]) -> Row:
    """Everything that is drawn."""
    runs = members[base][1]
    cap = max(len(r.tokens) for _, rs in members.values() for r in rs)
    shown = runs[:: max(1, len(runs) // CURVES)][:CURVES]
    curves = []
    for r in shown:
        curves.append({"prompt": r.prompt, **curve(r.tokens)})
    return {
        "curves": curves,
        "control": curve(ordinary[:cap]),
        "members": [
            {"name": name, **about, "runs": len(rs), "survival": [survived(rs, window, cap) for window in WINDOWS]}
            for name, (about, rs) in members.items()
        ],
    }


def figure(data: Row) -> Any:
    """Both panels."""
    result = data["result"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.09,
        subplot_titles=["(a) type-token ratio of the last 256 tokens", "(b) runs that have not collapsed"],
    )
    for i, one in enumerate(result["curves"]):
        fig.add_scatter(
            x=one["steps"],
            y=one["ttr"],
            mode="lines",
            line={"color": BLUE, "width": 1 + len(result["curves"]) - i},
            opacity=0.5,
            name="generated",
            legendgroup="generated",
            showlegend=i == 0,
            hovertext=one["prompt"],
            row=1,
            col=1,
        )
        if one["collapse"] is not None:
            at = min(range(len(one["steps"])), key=lambda k: abs(one["steps"][k] - one["collapse"]))
            fig.add_scatter(
                x=[one["collapse"]],
                y=[one["ttr"][at]],
                mode="markers",
                name="collapse point",
                legendgroup="collapse",
                showlegend=i == 0,
                marker={"color": RED, "size": 9, "symbol": "circle-open", "line": {"width": 2}},
                row=1,
                col=1,
            )
    control = result["control"]
    fig.add_scatter(
        x=control["steps"],
        y=control["ttr"],
        mode="lines",
        name="ordinary text (control)",
        line={"color": GREEN, "width": 2},
        row=1,
        col=1,
    )
    fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    for i, member in enumerate(result["members"]):
        label = f"{member['name']}: {member['layers']} layers x {member['width']}"
        for one, dash in zip(member["survival"], ("solid", "dot"), strict=True):
            fig.add_scatter(
                x=one["steps"],
                y=one["survival"],
                mode="lines",
                name=f"{label}, W = {one['window']}",
                line={"color": COLOURS[i % len(COLOURS)], "dash": dash, "shape": "hv"},
                row=1,
                col=2,
            )
    fig.update_xaxes(title_text="new tokens")
    fig.update_xaxes(range=[0, SHOWN], row=1, col=1)
    fig.update_xaxes(range=[0, 640], row=1, col=2)
    fig.update_yaxes(**powers(), range=[-2, 0.02], row=1, col=1)
    fig.update_yaxes(range=[-0.02, 1.03], tickformat=".0%", row=1, col=2)
    told = [
        f"{one['collapsed']:.0%} of {member['runs']} runs of {member['name']} (W = {one['window']}, "
        f"median step {one['median']:g})"
        for member in result["members"]
        for one in member["survival"]
    ]
    found = "Diversity collapses in " + ", in ".join(told) + "; in ordinary text it does not"
    if control["collapse"] is None:
        found = found
    else:
        found = found.partition(";")[0]
    return figure_of(fig, None, found, width=1500, height=560)


def main(
    folders: Sequence[Path] = (),
    *,
    work: Path,
    base_run: Path | None = None,
    max_new_tokens: int = 2500,
    batch_size: int = 24,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        folders: Trained members of the family.
        work: Where runs are kept.
        base_run: A run of the model in the package with method full.
    """
    started = time.perf_counter()
    members: dict[str, tuple[Row, list[BenchRecord]]] = {}
    with ProgressBar() as progress:
        for folder in folders:
            note(f"{folder.name}: {max_new_tokens} tokens after each prompt")
            runs = runs_of(load(str(folder), backend="hf"), work / folder.name, max_new_tokens, batch_size, progress)
            members[folder.name] = (trained(folder), runs)
        base = load(None, backend="hf")
        config = base.config
        tokenizer = base.tokenizer
        if base_run is None:
            runs = runs_of(base, work / "bundled", max_new_tokens, batch_size, progress)
        else:
            runs = full_runs(base_run)
    about = {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "steps": None,
        "seed": None,
        "validation_loss": None,
        "versions": None,
    }
    members["bundled"] = (about, runs)
    members = dict(sorted(members.items(), key=lambda item: (item[1][0]["layers"], item[1][0]["width"])))
    ordinary = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
    result = measure(members, "bundled", ordinary)
    family = []
    for f in folders:
        family.append(f.name)
    settings = {
        "family": family,
        "trained_by": "python -m experiments.train_bundled --size SIZE --steps STEPS --seed SEED",
        "prompts": "small",
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "theta_ttr": THETA_TTR,
        "windows": WINDOWS,
        "sampling": "greedy",
    }
    save("loopguard_fig2", record("loopguard-fig2", result, settings, started=started), figure, out)
    for member in result["members"]:
        for one in member["survival"]:
            print(
                f"{member['name']}, W = {one['window']}: {one['collapsed']:.0%} of {member['runs']} runs collapse, "
                f"median step {one['median']}"
            )


if __name__ == "__main__":
    run(main)
