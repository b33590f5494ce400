"""What ends loops, and what each remedy costs: samplers, stopping at the alarm, and LoopGuard, on the same prompts.

    python -m experiments.loopguard.remedies DIR [--model M] [--prompts stories|small] [--new 400] [--only NAME ...]
    python -m experiments.loopguard.remedies DIR ... --draw [--out figures]

It lets a model continue prompts greedily under each remedy, and appends each batch of outputs to DIR/runs.jsonl; run
it again to go on after an interruption. `--draw` makes the table and the figure of several DIRs; a remedy that a DIR
does not have stays as the figure's JSON has it. The prompts are story openings that are put together at random
(`--seed`), or those of LoopBench's small sets.

Every second prompt served to choose the guard's default; the table reports the others. Its columns:

- `loops`: share of outputs that end in a loop, by the rule of `sinkscope bench --task loops`. `ended`: share of outputs
  that reach the end of sequence, or of a story.
- `perplexity`: of up to 400 tokens after the first act of a guard (for other remedies, after the first alarm in the
  whole cache's output), read once more by the model with a clean cache. Only prompts whose output with the whole cache
  raises an alarm count.
- `acts`: interventions per output that had any. `drawn`: share of the interventions that drew tokens. `taken_back`:
  removed tokens, as a share of those that were left.
- `changed`: share of the outputs that differ from those of the whole cache although these raise no alarm.
- `steps`: median time of a step of the batch, over that of the whole cache.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from experiments.drawn import save
from experiments.record import Row, record, value_of_each
from experiments.script import run
from sinkscope.bench.prompt import read_prompts
from sinkscope.bench.tasks.loops import DATA, first_alarm, loops
from sinkscope.display.style import COLOURS, figure_of
from sinkscope.files.output import write_atomic
from sinkscope.kv.loopguard import LoopGuard, LoopReporter
from sinkscope.opening.load import load
from sinkscope.serving.generate import generate, padded

NAMES = ("Ben", "Mia", "Tom", "Lily", "Sam", "Anna", "Max", "Sara", "Tim", "Lucy", "Jack", "Nina", "Leo", "Emma")
THINGS = ("ball", "bird", "cat", "box", "tree", "dog", "boat", "hat", "frog", "star", "cake", "duck", "key", "train")
FORMS = (
    "{name} had a {thing}. {name} said,",
    "The {thing} was very big. {name} wanted to",
    "{name} asked {other} for the {thing}.",
    "One day, the {thing} sang the same song again and again:",
    "{name} and {other} saw a {thing}. The {thing} said,",
    "{other} gave the {thing} to {name}. {name} gave",
    "{name} looked for the {thing}. {other} looked",
    "The {thing} asked {name} to play. {name} said,",
)


def openings(count: int, seed: int) -> list[str]:
    """Story openings, two of each form in turn."""
    rng = random.Random(seed)
    texts: list[str] = []
    while len(texts) < count:
        name, other = rng.sample(NAMES, 2)
        text = FORMS[len(texts) // 2 % len(FORMS)].format(name=name, other=other, thing=rng.choice(THINGS))
        if text not in texts:
            texts.append(text)
    return texts


class Dry(LogitsProcessor):
    """DRY (p-e-w 2024): a token that prolongs a repetition of n tokens loses `strength * base ** (n - allowed)`."""

    def __init__(self, strength: float = 0.8, base: float = 1.75, allowed: int = 2, longest: int = 64) -> None:
        self._strength = strength
        self._base = base
        self._allowed = allowed
        self._longest = longest

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores with the penalties."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            lengths: dict[int, int] = {}
            for end in range(len(ids) - 1):
                if ids[end] != ids[-1]:
                    continue
                length = 1
                while length < min(end + 1, self._longest) and ids[end - length] == ids[-1 - length]:
                    length += 1
                lengths[ids[end + 1]] = max(length, lengths.get(ids[end + 1], 0))
            for token, length in lengths.items():
                if length >= self._allowed:
                    scores[row, token] -= self._strength * self._base ** (length - self._allowed)
        return scores


@dataclass(frozen=True)
class Output:
    """What a model wrote.

    Attributes:
        method: Name of the remedy.
        prompt: Number of the prompt.
        tokens: Ids of the new tokens.
        ended: Whether it ended by itself.
        acts: Number of acts of a guard.
        draws: How many of them drew tokens.
        taken_back: Number of tokens that were removed from the output.
        nll: Mean surprise of the text after the first act or alarm; None without one.
        seconds: Processor time of a step of its batch.
    """

    method: str
    prompt: int
    tokens: list[int]
    ended: bool
    acts: int
    draws: int
    taken_back: int
    nll: float | None
    seconds: float

    @property
    def alarm(self) -> int | None:
        """Step of the first alarm of the default monitor."""
        return first_alarm(self.tokens, [0.0] * len(self.tokens))

    @property
    def loops(self) -> bool:
        """Whether it ends in a loop."""
        return loops(self.tokens)


Outputs = dict[tuple[str, int], Output]


METHODS: dict[str, Callable[[], Any]] = {
    "full": dict,
    "temperature 0.7": lambda: {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "repetition penalty 1.1": lambda: {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.1)]},
    "no-repeat-4": lambda: {"logits_processor": [NoRepeatNGramLogitsProcessor(4)]},
    "no-repeat-6": lambda: {"logits_processor": [NoRepeatNGramLogitsProcessor(6)]},
    "DRY": lambda: {"logits_processor": [Dry()]},
    "stop": dict,
    "LoopGuard.paper": LoopGuard.paper,
    "cut": lambda: LoopGuard(escalate="none", rewind=False),
    "cut and ban": lambda: LoopGuard(escalate="ban", rewind=False),
    "LoopGuard, plain generate": lambda: LoopGuard(rewind=False),
    "LoopGuard": LoopGuard,
}


class Continuing:
    """A model that continues prompts. A story ends at BOS where the model was trained on stories in a row."""

    def __init__(self, model: Any, new: int, seed: int) -> None:
        self.model = model
        self.new = new
        self.seed = seed
        self.ends = {model.generation_config.eos_token_id, model.tokenizer.bos_token_id}
        model.generation_config.eos_token_id = sorted(self.ends)

    @torch.no_grad()
    def outputs(self, method: str, prompts: dict[int, str], alarms: dict[int, int | None]) -> list[Output]:
        """Continue prompts; `alarms` are those of the whole cache's outputs, from where the surprise is measured."""
        rows = []
        for text in prompts.values():
            rows.append(self.model.tokenizer(text, verbose=False)["input_ids"])
        started = process_time()
        made = METHODS[method]()
        events: list[Sequence[Any]] = [()] * len(rows)
        if isinstance(made, LoopGuard):
            told = generate(self.model, rows, guard=made, max_new_tokens=self.new, batch_size=len(rows))
            written = []
            for one in told:
                written.append(one.tokens)
            events = []
            for one in told:
                events.append(one.events)
        else:
            written = self._generated(rows, made, stops=method == "stop")
        outputs: list[Output] = []
        for place, number in enumerate(prompts):
            tokens = written[place]
            cuts = []
            for event in events[place]:
                cuts.append(event.data)
            counts = value_of_each(cuts, "taken_back")
            back = sum(counts)
            counts = []
            for cut in cuts:
                counts.append(cut["escalated"] == "draw")
            output = Output(
                method=method,
                prompt=number,
                tokens=tokens,
                ended=bool(tokens) and tokens[-1] in self.ends,
                acts=len(cuts),
                draws=sum(counts),
                taken_back=back,
                nll=None,
                seconds=(process_time() - started) / max(map(len, written)),
            )
            acted = alarms.get(number, output.alarm)
            if cuts:
                acted = cuts[0]["generated"] - cuts[0]["taken_back"]
            outputs.append(replace(output, nll=self.surprise(rows[place], tokens, acted)))
        return outputs

    def _generated(self, rows: list[list[int]], options: Row, stops: bool) -> list[list[int]]:
        """New tokens of each row under a sampler, or up to the alarm of a reporter that stops rows."""
        reporter = LoopReporter(eos_token_id=[*self.ends, 0], stop=True)
        if stops:
            options = {"logits_processor": [reporter]}
        torch.manual_seed(self.seed)
        ids, mask = padded(rows, 0, self.model.device)
        settings = {"max_new_tokens": self.new, "do_sample": False, "pad_token_id": 0, **options}
        output = self.model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :].tolist()
        alarms = {}
        for event in reporter.events:
            alarms[event.row] = event.step
        written: list[list[int]] = []
        for number, row in enumerate(output):
            ends = []
            for place, token in enumerate(row):
                if token in self.ends:
                    ends.append(place + 1)
            written.append(row[: alarms.get(number, min(ends, default=len(row)))])
        return written

    def surprise(self, ids: list[int], tokens: list[int], after: int | None) -> float | None:
        """Mean surprise of at most 400 tokens after a step, for the model with a clean cache."""
        if after is None or after + 1 >= len(tokens):
            return None
        text = tokens[: after + 401]
        logits = self.model(torch.tensor([[*ids, *text]]), use_cache=False).logits[0, len(ids) + after : -1].float()
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[after + 1 :])))


def read(work: Path) -> Outputs:
    """The outputs of a folder."""
    file = work / "runs.jsonl"
    if not file.exists():
        return {}
    outputs = []
    for line in file.read_text().splitlines():
        outputs.append(Output(**json.loads(line)))
    values = {}
    for output in outputs:
        values[(output.method, output.prompt)] = output
    return values


def continue_all(continuing: Continuing, texts: Sequence[str], work: Path, methods: Sequence[str], batch: int) -> None:
    """Continue the prompts under each remedy; what is in the folder already is not continued again."""
    outputs = read(work)
    for method in methods:
        missing = []
        for each in range(len(texts)):
            if (method, each) not in outputs:
                missing.append(each)
        for start in range(0, len(missing), batch):
            part = {}
            for each in missing[start : start + batch]:
                part[each] = texts[each]
            alarms: dict[int, int | None] = {}
            if method != "full":
                for number in part:
                    alarms[number] = outputs["full", number].alarm
            with (work / "runs.jsonl").open("a") as file:
                for output in continuing.outputs(method, part, alarms):
                    outputs[method, output.prompt] = output
                    file.write(json.dumps(asdict(output)) + "\n")
        for half in (0, 1):
            print(json.dumps({"half": half, **row_of(method, outputs, half)}), flush=True)


def row_of(method: str, outputs: Outputs, half: int) -> Row:
    """One row of the table, over every second prompt."""
    mine = []
    for (name, number), output in outputs.items():
        if name == method and number % 2 == half:
            mine.append(output)
    full = {}
    for (name, number), output in outputs.items():
        if name == "full":
            full[number] = output
    healthy = []
    for output in mine:
        if full[output.prompt].alarm is None:
            healthy.append(output)
    surprise = []
    for output in mine:
        if output.nll is not None and full[output.prompt].alarm is not None:
            surprise.append(output.nll)
    acts = []
    for output in mine:
        if output.acts:
            acts.append(output.acts)
    counts = []
    for each in mine:
        counts.append(len(each.tokens))
    tokens = sum(counts)
    ratios = []
    for output in mine:
        ratios.append(output.seconds / full[output.prompt].seconds)
    perplexity = None
    if surprise:
        perplexity = math.exp(fmean(surprise))
    counts = []
    for each in mine:
        counts.append(each.loops)
    return {
        "method": method,
        "outputs": len(mine),
        "loops": sum(counts),
        "ended": sum(output.ended for output in mine),
        "length": tokens / len(mine),
        "perplexity": perplexity,
        "acts": fmean(acts) if acts else 0.0,
        "drawn": sum(output.draws for output in mine) / max(1, sum(acts)),
        "taken_back": sum(output.taken_back for output in mine) / tokens,
        "healthy": len(healthy),
        "changed": sum(output.tokens != full[output.prompt].tokens for output in healthy),
        "steps": median(ratios),
    }


def figure(data: Row) -> Any:
    """Loops and perplexity of each remedy, a colour for each setting."""
    from plotly.subplots import make_subplots

    fig: Any = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.08, subplot_titles=["outputs that loop", "perplexity after the first act"]
    )
    said: list[str] = []
    for setting, colour in zip(data["result"]["settings"], COLOURS, strict=False):
        rows = setting["reported"]
        names = value_of_each(rows, "method")
        style = {"marker_color": colour, "legendgroup": setting["name"], "name": setting["name"]}
        y = []
        for each in rows:
            y.append(each["loops"] / each["outputs"])
        fig.add_bar(x=names, y=y, **style, row=1, col=1)
        y = value_of_each(rows, "perplexity")
        fig.add_bar(x=names, y=y, **style, showlegend=False, row=1, col=2)
        by_name = {}
        for row in rows:
            by_name[row["method"]] = row
        full = by_name["full"]
        guard = by_name["LoopGuard"]
        said.append(f"{guard['loops']} instead of {full['loops']} of {guard['outputs']} ({setting['name']})")
    fig.update_yaxes(range=[0, 1.03], tickformat=".0%", row=1, col=1)
    found = f"With LoopGuard, outputs that loop: {', '.join(said)}"
    return figure_of(fig, None, found, width=1500, height=600, barmode="group", bottom=150)


def tables(works: Sequence[Path], out: Path) -> None:
    """The table and the figure of several settings."""
    settings: list[Row] = []
    earlier: dict[str, Row] = {}
    file = out / "loopguard_remedies.json"
    if file.exists():
        earlier = {}
        for setting in json.loads(file.read_text())["result"]["settings"]:
            earlier[setting["name"]] = setting
    for work in works:
        of_run = json.loads((work / "settings.json").read_text())
        outputs = read(work)
        name = f"{of_run['model']}, {of_run['prompts']}, {of_run['new']} tokens"
        if of_run["seed"]:
            name += f", seed {of_run['seed']}"
        rows: dict[str, list[Row]] = {}
        for number, half in enumerate(("chosen", "reported")):
            by_method = {}
            for each in earlier.get(name, {}).get(half, ()):
                by_method[each["method"]] = each
            by_method |= {method: row_of(method, outputs, number) for method in METHODS if (method, 0) in outputs}
            rows[half] = [by_method[method] for method in METHODS if method in by_method]
        settings.append({"name": name, **of_run, **rows})
        print(f"\n{name}\n")
        print("| remedy | loops | ended | perplexity | acts | drawn | taken back | healthy outputs changed | steps |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in rows["reported"]:
            if row["perplexity"] is None:
                perplexity = "-"
            else:
                perplexity = f"{row['perplexity']:.2f}"
            print(
                f"| {row['method']} | {row['loops']} of {row['outputs']} | {row['ended']} | {perplexity} | "
                f"{row['acts']:.1f} | {row['drawn']:.0%} | {row['taken_back']:.0%} | "
                f"{row['changed']} of {row['healthy']} | {row['steps']:.2f} |"
            )
    text = record("loopguard-remedies", {"settings": settings}, {"works": [work.name for work in works]})
    save("loopguard_remedies", text, figure, out)


def main(
    works: Sequence[Path],
    *,
    draw: bool = False,
    model: str | None = None,
    prompts: Literal["stories", "small"] = "stories",
    count: int = 80,
    new: int = 400,
    seed: int = 0,
    batch: int = 40,
    only: Sequence[Literal[*METHODS]] = tuple(METHODS),
    out: Path = Path("figures"),
) -> None:
    """Make what the module describes.

    Args:
        works: The folder of a setting; with --draw several.
        draw: Make the table and the figure instead of continuing prompts.
        model: A name, hub id or folder; by default the model in the package.
        count: Number of story openings.
        only: Remedies.
    """
    if draw:
        tables(works, out)
        return
    (work,) = works
    live: Any = load(model, backend="hf")
    texts = openings(count, seed)
    if prompts == "small":
        texts = []
        for prompt in [*read_prompts(DATA / "small-dc.jsonl"), *read_prompts(DATA / "small-ri.jsonl")]:
            texts.append(prompt.turns[0].text)
    name = "model in the package"
    if model:
        name = Path(model).name
    settings = {"model": name, "prompts": prompts, "new": new, "seed": seed, "count": len(texts)}
    write_atomic(work / "settings.json", json.dumps(settings))
    continue_all(Continuing(live, new, seed), texts, work, only, batch)


if __name__ == "__main__":
    run(main)
