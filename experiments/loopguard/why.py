"""What follows an intervention, and whether a loop depends on the cache or on the weights.

    python -m experiments.loopguard.why --guarded RUN ... [--full RUN] [--prompts 12] [--out figures]

RUNs are folders of `sinkscope bench --task loops` on the model in the package: `--guarded` with the methods `loopguard`
(the default), `loopguard:paper` (as printed) or both, and `--full` with the method `full`. What depends on a run that
is not given stays as the figure's JSON has it.

**After an intervention**: for each intervention of a guard, whether the next one (within W = 256 tokens) finds the same
cycle, another cycle, or none; and the model's confidence in the tokens of the loop.

**Where the loop lives**: outputs of `--full` are cut at the first alarm of the paper's monitor and after three quarters
of the text. The model reads the text so far; then a part of the cache is removed, and decoding continues greedily for
64 tokens. The parts are `nothing`; `LoopGuard's cut` and `the paper's cut` (level 0); `all generated` (the prompt
stays); `all but BOS`. "cycle goes on" is the share of runs whose next tokens, two periods or at least eight, continue
the cycle; "some loop" is the share whose 64 tokens end in a repetition (three copies, 24 tokens). The controls are
ordinary text under the same cuts, and the loop organism of the tests, whose loops depend on copies in the cache by
construction.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.drawn import save
from experiments.record import Row, record
from experiments.script import run
from sinkscope.bench.methods import read_method
from sinkscope.bench.record import BenchRecord, read_run
from sinkscope.bench.tasks.loops import Loops, first_alarm
from sinkscope.display.console import ProgressBar
from sinkscope.display.style import BLUE, GREEN, GREY, ORANGE, RED, figure_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_json
from sinkscope.kv.loopguard import LoopGuard, Retention, tokens_to_keep
from sinkscope.loops import tail_period
from sinkscope.loops.signals import WINDOW
from sinkscope.models.text import typical_text
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from tests.organisms import loop_organism

NEW, BUDGET = 64, 256
TEXT = 1200  # tokens of each piece of ordinary text
GUARDS = {"loopguard": "LoopGuard", "loopguard:paper": "the paper's"}
PRUNING = {"LoopGuard's cut": Retention(budget=BUDGET), "the paper's cut": Retention(budget=BUDGET, recent=WINDOW)}
STARTS = [(period, start) for start in (0, 1800) for period in (3, 4, 8, 12, 16, 24)]
"""Period and first token of each loop of the organism."""
CUTS = ("nothing", *PRUNING, "all generated", "all but BOS")


def same_cycle(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether one is the other, begun elsewhere."""
    twice = [*b, *b]
    return len(a) == len(b) and any(list(a) == twice[i : i + len(a)] for i in range(len(a)))


def aftermath(records: Sequence[BenchRecord]) -> Row:
    """What followed each intervention that had found a cycle."""
    counts = {"same": 0, "another": 0, "none": 0}
    parts: dict[str, dict[str, int]] = {}
    gaps: list[int] = []
    sure: list[float] = []
    periods: list[int] = []
    for one in records:
        cuts = []
        for e in one.events:
            if e["kind"] == "guard":
                cuts.append(e)
        for i, event in enumerate(cuts):
            step = event["data"]["generated"]
            period = event["data"]["period"]
            if period is None:
                continue
            cycle = one.tokens[step - period : step]
            sure += one.steps["top1"][step - period : step]
            periods.append(period)
            following = None
            if i + 1 < len(cuts):
                following = cuts[i + 1]["data"]
            if following is not None and following["generated"] - step <= WINDOW:
                gaps.append(following["generated"] - step)
                found = following["period"]
                later = ()
                if found:
                    later = one.tokens[following["generated"] - found : following["generated"]]
                came = "another"
                if same_cycle(cycle, later):
                    came = "same"
            elif following is not None or len(one.tokens) - step > WINDOW:
                came = "none"
            else:
                continue  # the run ends too soon to say
            counts[came] += 1
            for part in ("first" if i == 0 else "later", f"period {period}" if period < 5 else "period 5 or more"):
                parts.setdefault(part, dict.fromkeys(counts, 0))[came] += 1
    total = max(1, sum(counts.values()))
    shares = {}
    for name, n in counts.items():
        shares[name] = n / total
    median_gap = None
    if gaps:
        median_gap = statistics.median(gaps)
    median_period = None
    if periods:
        median_period = statistics.median(periods)
    mean = None
    if sure:
        mean = statistics.fmean(sure)
    return {
        "interventions": total,
        "shares": shares,
        "counts": counts,
        "parts": dict(sorted(parts.items())),
        "median_gap": median_gap,
        "median_period": median_period,
        "probability_in_loop": {
            "mean": mean,
            "above_0.9": sum(p > 0.9 for p in sure) / len(sure) if sure else None,
        },
    }


@torch.no_grad()
def read(model: Any, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all tokens but the last, per layer."""
    cache: Any = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    rows = []
    for layer in cache.layers:
        rows.append((layer.keys, layer.values))
    return rows


@torch.no_grad()
def go_on(
    model: Any, ids: list[int], layers: list[tuple[Tensor, Tensor]], keep: Sequence[int] | None, new: int
) -> list[int]:
    """Decode greedily with the positions `keep` of the cache (None: all); the last token is read where it stands."""
    cache: Any = DynamicCache(config=model.config)
    if keep is None:
        at = torch.arange(len(ids) - 1)
    else:
        at = torch.tensor(keep)
    for i, (keys, values) in enumerate(layers):
        cache.update(keys[:, :, at], values[:, :, at], i)
    token = ids[-1]
    made = []
    for position in range(len(ids) - 1, len(ids) - 1 + new):
        out = model(
            input_ids=torch.tensor([[token]]),
            past_key_values=cache,
            use_cache=True,
            position_ids=torch.tensor([[position]]),
        )
        token = int(out.logits[0, -1].argmax())
        made.append(token)
    return made


def kept(cut: str, ids: list[int], prompt: int, pruning: Mapping[str, Retention] = PRUNING) -> list[int] | None:
    """Positions that are left of all but the last token."""
    last = len(ids) - 1
    if cut == "nothing":
        return None
    if cut == "all generated":
        return list(range(min(prompt, last)))
    if cut == "all but BOS":
        return [0]
    generated = ids[prompt:]
    retention = pruning[cut]
    if retention.recent is None:
        begin = 0
    else:
        begin = max(0, len(generated) - retention.recent)
    tail = tail_period(generated[begin:], repeats=2)
    if tail is None:
        bad = []
    else:
        bad = [(prompt + begin + tail.start, len(ids))]
    rows = []
    for p in tokens_to_keep(range(len(ids)), len(ids), bad, retention):
        if p < last:
            rows.append(p)
    return rows


def counterfactual(model: Any, cases: Sequence[tuple[list[int], int]], tick: Any = None) -> list[Row]:
    """For each cut, how many of the cases go on in their cycle.

    Args:
        model: a plain Hugging Face model.
        cases: whole sequence, and how many of its tokens are the prompt.
        tick: called after each case.
    """
    going: dict[str, list[bool]] = {cut: [] for cut in CUTS}
    looping: dict[str, list[bool]] = {cut: [] for cut in CUTS}
    for ids, prompt in cases:
        layers = read(model, ids)
        tail = tail_period(ids[prompt:], repeats=2)
        for cut in CUTS:
            made = go_on(model, ids, layers, kept(cut, ids, prompt), NEW)
            if tail is not None:
                cycle = ids[-tail.period :]
                want = max(8, 2 * tail.period)
                expected = (cycle * (want // tail.period + 1))[:want]
                going[cut].append(made[:want] == expected[: len(made)])
            looping[cut].append(tail_period(made, shortest=24) is not None)
        if tick is not None:
            tick()
    return [
        {
            "cut": cut,
            "cases": len(cases),
            "with_cycle": len(going[cut]),
            "cycle_goes_on": sum(going[cut]) / len(going[cut]) if going[cut] else None,
            "some_loop": sum(looping[cut]) / len(cases),
        }
        for cut in CUTS
    ]


def organism_cases() -> tuple[Any, list[tuple[list[int], int]], Row]:
    """The loop organism in mid-loop, and what LoopGuard does to it while it generates."""
    made = loop_organism(0, reach=64)
    model: Any = made.model
    cases: list[tuple[list[int], int]] = []
    broken = 0
    for period, start in STARTS:
        prompt = made.looping_prompt(period, start=start)
        ids = prompt.ids[0].tolist()
        cases.append(([*ids, *made.expected(prompt, 256)], len(ids)))
        with LoopGuard.paper().on(model) as run:
            out = model.generate(
                input_ids=prompt.ids, attention_mask=torch.ones_like(prompt.ids), max_new_tokens=400, do_sample=False
            )[0, len(ids) :].tolist()
        steps = []
        for e in run.events:
            steps.append(e.data["generated"])
        last = None
        if steps:
            last = steps[-1]
        broken += last is not None and out[last + 1 :] == made.walk(out[last], len(out) - last - 1)
    return model, cases, {"prompts": len(STARTS), "broken_for_good": broken}


def text_cases(tokenizer: Any, count: int, length: int) -> list[tuple[list[int], int]]:
    """Ordinary text, its first half taken for the prompt."""
    ids = [tokenizer.bos_token_id, *tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]]
    rows = []
    for i in range(count):
        rows.append(([ids[0], *ids[1 + i * length : (i + 1) * length]], length // 2))
    return rows


def figure(data: Row) -> Any:
    """What followed, and which cuts end a cycle."""
    result = data["result"]
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1,
        cols=3,
        column_widths=[0.22, 0.39, 0.39],
        horizontal_spacing=0.07,
        subplot_titles=[
            "at the next intervention",
            "the same cycle goes on after the cut",
            "64 tokens later there is some loop",
        ],
    )
    labels = {"same": "same cycle", "another": "another cycle", "none": f"none in {WINDOW}"}
    for (method, found), pattern in zip(result["aftermath"].items(), ("", "/"), strict=False):
        shares = found["shares"]
        x = []
        for k in shares:
            x.append(labels[k])
        color = RED
        if pattern:
            color = GREY
        fig.add_bar(
            x=x,
            y=list(shares.values()),
            name=f"{GUARDS[method]} ({found['interventions']} interventions)",
            marker={"color": color, "pattern": {"shape": pattern}},
            row=1,
            col=1,
        )
    for (name, rows), colour in zip(result["where"].items(), (BLUE, ORANGE, GREEN, GREY), strict=False):
        for col, key in ((2, "cycle_goes_on"), (3, "some_loop")):
            if all(row[key] is None for row in rows):
                continue
            y = []
            for each in rows:
                y.append(each[key])
            fig.add_bar(
                x=[row["cut"] for row in rows],
                y=y,
                name=name,
                marker_color=colour,
                legendgroup=name,
                showlegend=col == 3,
                row=1,
                col=col,
            )
    fig.update_yaxes(range=[0, 1.03], tickformat=".0%")
    fig.update_xaxes(title_text="what is taken out of the cache", row=1, col=2)
    fig.update_xaxes(title_text="what is taken out of the cache", row=1, col=3)
    own = next(iter(PRUNING))
    with_cycles = [name for name, rows in result["where"].items() if rows[0]["cycle_goes_on"] is not None]
    name = with_cycles[0]
    goes_on = {}
    for row in result["where"][name]:
        goes_on[row["cut"]] = row["cycle_goes_on"]
    found = (
        f"The same cycle goes on in {goes_on['nothing']:.0%} of the cases if nothing is cut from the cache, and in "
        f"{goes_on[own]:.0%} after {own} ({name})"
    )
    return figure_of(fig, None, found, width=1500, height=600, barmode="group", legend=-0.25, bottom=170)


def main(
    *,
    guarded: Sequence[Path],
    full: Path | None = None,
    budget: int = BUDGET,
    prompts: int = 12,
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        guarded: Runs with loopguard, loopguard:paper or both.
        full: A run with the method full.
        budget: Of the guards in these runs.
    """
    started = time.perf_counter()
    methods = {}
    for each in GUARDS:
        methods[each] = read_method(each, budget).spec
    records = {
        name: [r for f in guarded for r in read_run(f) if r.method == method] for name, method in methods.items()
    }
    after = {name: aftermath(runs) for name, runs in records.items() if runs}
    if full is None:
        earlier = read_json(out / "loopguard_why.json", "give --full a run, which begins it")
        earlier["result"]["aftermath"] |= after
        text = record("loopguard-why", earlier["result"], earlier["settings"], started=started)
        save("loopguard_why", text, figure, out)
        print(after)
        return
    unguarded = []
    for r in read_run(full):
        if r.method == "full":
            unguarded.append(r)
    unguarded = unguarded[:: max(1, len(unguarded) // prompts)][:prompts]
    if not unguarded:
        raise SinkscopeError(f"{full.name} has no answers with the method full: give --full a run that has")
    model = load(None, backend="hf")
    texts_by_id = {}
    for each in Loops().prompts(target_of(model)):
        texts_by_id[each.id] = each.turns[0].text
    cases: dict[str, list[tuple[list[int], int]]] = {"at the first alarm": [], "at three quarters": []}
    for one in unguarded:
        prompt = model.tokenizer(texts_by_id[one.prompt], verbose=False)["input_ids"]
        alarm = first_alarm(one.tokens, one.steps["top1"], "full")
        if alarm is not None:
            cases["at the first alarm"].append(([*prompt, *one.tokens[:alarm]], len(prompt)))
        cases["at three quarters"].append(([*prompt, *one.tokens[: 3 * len(one.tokens) // 4]], len(prompt)))
    organism, planted, broken = organism_cases()
    texts = text_cases(model.tokenizer, prompts, TEXT)
    done = 0
    total = sum(map(len, cases.values())) + len(planted) + len(texts)
    with ProgressBar() as progress:

        def tick() -> None:
            nonlocal done
            done += 1
            progress("continuations", done, total)

        where: dict[str, list[Row]] = {}
        for name, part in cases.items():
            if part:  # answers that end before the monitor's first alarm have no case there
                where[f"model in the package, {name}"] = counterfactual(model, part, tick)
        where["loop organism (control)"] = counterfactual(organism, planted, tick)
        where["ordinary text (control)"] = counterfactual(model, texts, tick)
    result = {
        "aftermath": after,
        "where": where,
        "organism": broken,
    }
    settings = {
        "guarded": [folder.name for folder in guarded],
        "full": full.name,
        "prompts": prompts,
        "new": NEW,
        "budget": BUDGET,
        "organism": "loop_organism(0, reach=64), periods 3 to 24",
        "sampling": "greedy",
    }
    save("loopguard_why", record("loopguard-why", result, settings, started=started), figure, out)
    print(result["aftermath"], result["organism"])
    for name, rows in where.items():
        print(name, [(r["cut"], r["cycle_goes_on"], r["some_loop"]) for r in rows])


if __name__ == "__main__":
    run(main)
