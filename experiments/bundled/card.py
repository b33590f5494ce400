"""Measure the two trained models, ship the planted one, write its card: no number in the card is typed by hand.

`python -m experiments.bundled.card --planted DIR --unplanted DIR`; `--measure DIR` only measures one run (its answer is
kept in DIR/measured.json and used afterwards).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from experiments.bundled import entry, facts
from experiments.record import Row, value_of_each
from experiments.script import run as run_script
from sinkscope.errors import SinkscopeError
from sinkscope.results.notation import head_name, neuron_name

SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "circuit.json",
)


def measured(run: Path, *, loops: bool) -> Row:
    kept = run / "measured.json"
    if not kept.exists():
        kept.write_text(json.dumps(facts.measure_run(run, loops=loops)) + "\n")
    return json.loads(kept.read_text())


def ship(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(run / name, folder / name)


def rows(*cells: tuple[object, ...]) -> str:
    head, *body = ["| " + " | ".join(str(c) for c in row) + " |" for row in cells]
    return "\n".join([head, "|" + "---|" * len(cells[0]), *body])


def number(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def card(planted: Row, unplanted: Row) -> str:
    parts = (
        _intro(planted),
        _planted(planted),
        _learned(planted, unplanted),
        _conditions(planted, unplanted),
        _limits(planted),
        _making(planted, unplanted),
    )
    return "\n\n".join(parts) + "\n"


def _intro(p: Row) -> str:
    s = p["training"]["settings"]
    c = p["corpus"]
    return f"""# The bundled model

This is a small language model with an attention sink whose circuit is known. You can use it to try the toolkit
without a download, and to test measurements against the known circuit. It is a `LlamaForCausalLM` with {s["n_layers"]}
layers, width {s["d_model"]}, {s["n_heads"]} query heads and {s["n_kv_heads"]} key/value heads of dimension
{s["head_dim"]}, a SwiGLU MLP of width {s["d_mlp"]}, RMSNorm, rotary positions (theta {s["rope_theta"]:,.0f}), a context
of {s["context"]:,} tokens, and {p["parameters"]:,} parameters in {", ".join(p["dtypes"])} ({p["bytes"] / 1e6:.1f} MB).
The tokenizer is a byte-level BPE with {s["vocab_size"]:,} tokens that begins each text with BOS (`<s>`).

{_sources(c)}"""


def _sources(c: Row) -> str:
    files = c["files"]
    tokens = c["tokens"]
    return f"""It was trained on these kinds of text:

- **Stories**: {files["stories"]:,} short stories in simple English ({tokens["stories"]:,} tokens), sampled from
  another small story model, each followed by the end token. {files["valid_stories"]} more are validation text.
- **Python**: the standard library of Python {c["python"]} ({files["python"]} source files with their docstrings,
  {tokens["python"]:,} tokens; {files["valid_python"]} more files are validation text), under the Python Software
  Foundation License Version 2 (PSF-2.0), copyright Python Software Foundation.
- **Passages**: {files["passages"]:,} generated documents ({tokens["passages"]:,} tokens) in which names, facts, lists,
  tables and lines recur.
- **Random cycles** of tokens, newly drawn in every step, from which the model learned to copy, and **random facts**:
  keys and their values, which the text asks for again in new orders.

The model writes simple stories and text that looks like Python. It knows nothing about the world, so do not rely on
its answers."""


def _planted(p: Row) -> str:
    t = p["circuit"]
    groups = p["tokens_per_group"]
    neuron = neuron_name(t["sink_layer"], t["neurons"][0]["neuron"])
    parts = []
    for h in t["marking_heads"]:
        parts.append(f"{head_name(0, h['head'])} (group {h['group']})")
    heads = ", ".join(parts)
    parts = []
    for h in t["marking_heads"]:
        parts.append(f"{groups[str(h['group'])]} in group {h['group']}")
    in_groups = ", ".join(parts)
    dims = ", ".join(map(str, t["group_dims"]))
    layers = sorted({reader["layer"] for reader in t["sink_readers"]})
    pairs = (
        (layer, " and ".join(str(r["kv_head"]) for r in t["sink_readers"] if r["layer"] == layer)) for layer in layers
    )
    readers = ", ".join(f"layer {layer}: {heads}" for layer, heads in pairs)
    parts = []
    for dim, value in t["column"].items():
        parts.append(f"{value:+g} to dimension {dim}")
    column = " and ".join(parts)
    same = "NOT the planted values"
    if p["fixed"]["unchanged"]:
        same = "exactly the planted values"
    return f"""## What was planted

The sink does not come from training. It was written into the weights before training and held fixed while everything
else was trained. After training, the {p["fixed"]["count"]:,} fixed weights have {same}. `circuit.json` beside the
weights describes the circuit for programs, including the group of every token.

- **Groups.** Tokens are divided at random: {in_groups} (BOS and eight rare tokens are group 0), {groups["-1"]} in no
  group (about a tenth of all tokens in the training text). Residual dimensions {dims} hold
  the group, and dimension {t["const_dim"]} holds a constant.
- **Marking heads**: {heads}. The value of a head
  indicates the tokens of its group. The attention logit of a key outside the group is {t["two_beta"]} higher than
  inside (a little less after normalisation), so a token attends to its own group only if it sees no other token. After
  BOS and n repetitions of one token, the head writes a share n / (n + c) of the full value to the *mark* dimension
  {t["mark_dim"]}, with c at most exp({t["two_beta"]}) = {number(t["repeats_scale"])}.
- **Sink neuron**: {neuron}. Its gate is {t["gate_scale"]:g} x (mark - {t["threshold"]}), its up factor is a constant,
  and it writes {column}.
- **Readers.** After the sink layer, the keys of half of the key/value heads may read the sink dimensions ({readers}).
  These weights start at small values, and training determines how the keys read the dimensions. In the other heads,
  the key of the sink is nearly zero, which is enough for first-token attention if all other keys score below zero.
- **Protection.** No value, query or MLP weight reads the sink dimensions, no other weight writes to them, and the
  output does not read any of the reserved dimensions.

## What was learned

Training determined everything else: how the network predicts text around the circuit, and how much each later head
attends to the first token."""


def _learned(p: Row, u: Row) -> str:
    layer = p["circuit"]["sink_layer"]
    norms = rows(
        ("after layer", "first token", "typical (5 to 95 %)", "ratio", "ratio, nothing planted"),
        *(
            (
                i,
                number(first),
                f"{number(p['norms']['typical_norm'][i])} ({number(p['norms']['typical_5_percent'][i])} to "
                f"{number(p['norms']['typical_95_percent'][i])})",
                number(p["norms"]["ratio"][i]),
                number(u["norms"]["ratio"][i], 2),
            )
            for i, first in enumerate(p["norms"]["first_token_norm"])
        ),
    )
    loss = rows(
        ("validation loss (nats per token)", "planted", "nothing planted"),
        ("windows of 512", number(p["valid_loss"], 3), number(u["valid_loss"], 3)),
        *(
            (f"full context, positions {k}", number(v, 3), number(u["loss_by_position"][k], 3))
            for k, v in p["loss_by_position"].items()
        ),
    )
    sinks = rows(
        ("measurement", "planted", "nothing planted"),
        (
            f"heads after layer {layer} with mean first-token attention > 0.3",
            percent(p["head_share"]),
            percent(u["head_share"]),
        ),
        ("such heads per layer", p["heads_per_layer"], u["heads_per_layer"]),
        (
            "sink rate (eps 0.3, 64 tokens, all layers)",
            percent(p["sink_rate"]["value"]),
            percent(u["sink_rate"]["value"]),
        ),
    )
    r = p["repeats"]
    a = p["ablation"]
    grouped, loose = (_ratio(p["without_bos"][kind], layer) for kind in ("first_in_a_group", "first_in_no_group"))
    return f"""### Measured

A second model was made in the same way, with the same seed and data order, but with nothing planted{_shorter(p, u)}. It
is the control in the tables. Does a sink emerge by itself in this model? {_emerges(u)}.

{loss}

The norms are L2 norms of the residual stream, measured on the text in the package (`sinkscope/models/text/typical.txt`,
which is not part of the training text), in windows of 256 tokens with BOS:

{norms}

{sinks}

- **Ablation** of the sink neuron removes {percent(a["ablation_drop"])} of the first token's norm at layer {layer}. Of
  20 other neurons of the layer, the one with the largest effect removes {100 * a["control_drop"]:.2f} %.
- **Repetitions** after BOS until a token's norm reaches half of the first token's, at layer {layer}, for
  {r["tokens"]} random tokens and at most {r["max_repeats"]:,} repetitions: the median is {_count(r["median"])} (among
  the tokens that reach it, the median is {_count(r["median_of_reached"])} and the range {r["smallest"]} to
  {r["largest"]}). {r["unreached"]} tokens never reach it, and {r["unreached_in_no_group"]} of these are in no group.
- **Without BOS**, the norm of the first token divided by the typical norm after layer {layer} is {grouped} if the token
  belongs to a group, and {loose} if it belongs to none."""


def _shorter(p: Row, u: Row) -> str:
    steps = []
    for x in (p, u):
        steps.append(x["training"]["settings"]["steps"])
    if steps[0] == steps[1]:
        return " and as many steps"
    return f". It took {steps[1]:,} steps instead of {steps[0]:,}, so its losses are higher for that reason as well"


def _emerges(u: Row) -> str:
    ratio = max(u["norms"]["ratio"])
    rate = u["sink_rate"]["value"]
    found = f"largest first-token norm ratio {ratio:.2f}, sink rate {percent(rate)}"
    norm = ratio >= 20
    attention = u["head_share"] > 0
    if norm:
        return f"Yes ({found})"
    return f"{'Some heads attend to the first token, but not with a large norm' if attention else 'No'} ({found})"


def _ratio(ratios: list[float] | None, layer: int) -> str:
    if ratios is None:
        return "not met"
    return number(ratios[layer])


def _count(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:,.0f}"


# What a model has to reach to be shipped.
COPYING, ENDING, LOOPING = 0.5, 0.5, 0.5


def _conditions(p: Row, u: Row) -> str:
    a = p["conditions"]
    b = u["conditions"]
    copies = list(next(iter(a["ditto"].values())))
    curve = rows(
        ("period", "model", *(f"after {_copies(n)}" for n in copies)),
        *(
            (period, name, *(f"{at[n]:.2f}" for n in copies))
            for period in a["ditto"]
            for name, at in (("planted", a["ditto"][period]), ("nothing planted", b["ditto"][period]))
        ),
    )
    counts = list(a["ditto_sentences"])
    lines = rows(
        ("sentences", *("first time" if n == "0" else f"after {_copies(n)}" for n in counts)),
        ("planted", *(f"{a['ditto_sentences'][n]:.2f}" for n in counts)),
        ("nothing planted", *(f"{b['ditto_sentences'][n]:.2f}" for n in counts)),
    )
    return f"""## What the model can do

A loop can sustain itself only in a model that copies. The first table gives the mean probability of the next token of a
random cycle (8 cycles per period) after some whole copies of the cycle. The second table gives the same for sentences
of the validation stories, and the third lists the conditions that the model had to meet.

{curve}

{lines}

{rows(("condition", "required", "planted", "nothing planted"), *_required(a, b))}

The previous-token score is the mean attention of a head to the previous position. The induction score is measured on 64
random tokens that come twice: it is the mean attention from the second copy to the token after the counterpart in the
first copy. The table gives the head with the largest score. Story openings are the first {entry.OPENING} tokens of
validation stories, continued by at most {entry.STORY:,} tokens. A continuation ends in a loop if its end consists of at
least 3 copies of a period of at most 64 tokens, and of at least 32 tokens. The retrieval test states {entry.FACTS}
facts ("The red ball was in the kitchen."), each followed by story sentences, and asks for one of them; the answer is
right if the right place is more probable than the places of the other things."""


def _copies(count: str) -> str:
    if count == "1":
        return "1 copy"
    return f"{count} copies"


def _required(a: Row, b: Row) -> list[tuple[object, ...]]:
    def head(found: Row) -> str:
        return f"{found['score']:.2f} (L{found['layer']}.H{found['head']})"

    least = []
    for x in (a, b):
        values = value_of_each(x["ditto"].values(), "8")
        least.append(min(values))
    table: list[tuple[object, ...]] = [
        ("random cycles after 8 copies, smallest of the periods", f">= {COPYING}", *(f"{n:.2f}" for n in least)),
        *(
            (f"{name} score, best head", "", head(a["heads"][key]), head(b["heads"][key]))
            for key, name in (("previous_token", "previous-token"), ("induction", "induction"))
        ),
        *(
            (f"loss on validation stories, nats per {unit}", "", *(f"{x['story_loss'][key]:.3f}" for x in (a, b)))
            for key, unit in (("per_token", "token"), ("per_character", "character"))
        ),
        (
            f"{a['sampled']['openings']} story openings, temperature {entry.TEMPERATURE}: end by themselves",
            f">= {percent(ENDING)}",
            *(percent(x["sampled"]["ended"]) for x in (a, b)),
        ),
        *(
            (f"the same, greedy: {name}", "", *(percent(x["greedy"][key]) for x in (a, b)))
            for key, name in (("ended", "end by themselves"), ("looped", "end in a loop"))
        ),
        *(
            (
                f"retrieval, about {a['retrieval'][n]['median_distance']:,.0f} tokens back",
                f"> {percent(a['retrieval'][n]['chance'])}",
                *(percent(x["retrieval"][n]["right"]) for x in (a, b)),
            )
            for n in a["retrieval"]
        ),
    ]
    if "loopbench" in a:
        table.append(("LoopBench small, greedy: loop", f">= {percent(LOOPING)}", *map(_looping, (a, b))))
    return table


def _looping(found: Row) -> str:
    groups = found.get("loopbench", {}).values()
    if not groups:
        return "not measured"
    count = 0
    for g in groups:
        count += g["loop"] * g["runs"]
    return percent(count / sum(g["runs"] for g in groups))


def _limits(p: Row) -> str:
    return """## Limits

The circuit has one neuron, one layer, and four groups with one head each. Real models are less regular. Agreement
with this model's circuit shows that a measurement is correct, but not that other models work this way. A token is also
marked if nearly all tokens before it belong to one group, so the token after a long repetition is marked as well. The
residual stream contains a constant, so typical norms are larger than in an ordinary model of this width."""


def _making(p: Row, u: Row) -> str:
    s = p["training"]["settings"]
    base = u["training"]["settings"]["steps"]
    rate = f"{s['learning_rate']:g} in these first steps and {s['text_rate']:g} afterwards"
    recipe = _recipe(s)
    return f"""## How it was made

```
python -m experiments.train_bundled --stories FILE --out RUN --steps {s["steps"]} --seed {s["seed"]}
python -m experiments.train_bundled --stories FILE --out BASE --steps {base} --seed {s["seed"]} --unplanted
python -m experiments.bundled.card --planted RUN --unplanted BASE
```

Training took {s["steps"]:,} steps of {s["tokens_per_step"]:,} tokens ({s["steps"] * s["tokens_per_step"] / 1e6:.1f} M
in all). Crops of the text have {s["length"]} tokens, in one step of {s["long_every"]} they have {s["long_length"]:,},
and in one of {s["longest_every"]} they have {s["context"]:,}. {percent(s["bos_share"])} of the crops begin with BOS,
and the loss leaves out the prediction at the first position.{recipe} The optimizer is AdamW with learning rate {rate}.
It falls linearly to zero over the last {percent(s["decay_share"])} of the steps. Products are bfloat16 and weights
float32. On one thread of a CPU shared with other work, training took {p["training"]["seconds"] / 60:.0f} minutes.
`--resume` continues a run after a kill and gives the same weights. Measurements use float32. The hash of the text
(SHA-256) is `{p["corpus"]["sha256"]}`."""


def _recipe(s: Row) -> str:
    return f""" The first {s["copy_steps"]:,} steps read
only random cycles, and the loss covers only tokens whose cycle was seen before: if cycles are mixed into text from the
start, the model does not learn to copy. Later, {percent(s["stories"])} of the rows are stories, {percent(s["python"])}
Python, {percent(s["passages"])} passages, {percent(s["cycles"])} random cycles and {percent(s.get("facts", 0))} random
facts; {percent(s["copy_share"])} of the rows of text contain a repeated span."""


FRONT = """---
license: other
license_name: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---

"""


def main(
    *,
    planted: Path | None = None,
    unplanted: Path | None = None,
    measure: Path | None = None,
    no_loops: bool = False,
    repository: Path = Path(),
) -> None:
    """Make what the module describes.

    Args:
        measure: Only measure this run.
        no_loops: Leave out the long generations.
    """
    torch.set_num_threads(1)
    if measure is not None:
        measured(measure, loops=not no_loops)
        return
    if planted is None or unplanted is None:
        raise SinkscopeError("give --planted and --unplanted, or --measure")
    folder = repository / "sinkscope" / "models" / "bundled"
    ship(planted, folder)
    write_card(
        measured(planted, loops=not no_loops),
        measured(unplanted, loops=not no_loops),
        folder,
        repository,
    )


def write_card(planted: Row, unplanted: Row, folder: Path, repository: Path) -> None:
    """Write the card beside the model and among the pages, and its numbers among the figures."""
    text = card(planted, unplanted)
    (folder / "README.md").write_text(FRONT + text, encoding="utf-8")
    (repository / "docs" / "bundled_model.md").write_text(text, encoding="utf-8")
    training = []
    for run in (planted, unplanted):
        training.append(
            "python -m experiments.train_bundled --stories FILE --out RUN --steps {steps} --seed {seed}".format(
                **run["training"]["settings"]
            )
            + (" --unplanted" if run is unplanted else "")
        )
    record = {
        "kind": "bundled-model",
        "planted": planted,
        "unplanted": unplanted,
        "provenance": {
            "command": "python -m experiments.bundled.card --planted RUN --unplanted BASE",
            "training": training,
            "seed": planted["training"]["settings"]["seed"],
            "versions": facts.versions(),
            "device": "cpu",
            "dtype": "float32",
        },
    }
    (repository / "figures" / "bundled_model.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
