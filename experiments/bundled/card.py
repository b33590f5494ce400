"""Measure the two trained models, ship the planted one, write its card: no number in the card is typed by hand.

`python -m experiments.bundled.card --planted DIR --unplanted DIR`; `--measure DIR` only measures one run (its answer is
kept in DIR/measured.json and used afterwards).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from experiments.bundled import facts, measure

SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "circuit.json",
)


def measured(run: Path, *, again: bool, loops: bool) -> dict[str, Any]:
    kept = run / "measured.json"
    if again or not kept.exists():
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


def card(planted: dict[str, Any], unplanted: dict[str, Any]) -> str:
    parts = (
        _intro(planted),
        _planted(planted),
        _learned(planted, unplanted),
        _limits(planted),
        _making(planted),
    )
    return "\n\n".join(parts) + "\n"


def _intro(p: dict[str, Any]) -> str:
    s, c = p["training"]["settings"], p["corpus"]
    return f"""# The bundled model

A small language model with an attention sink whose circuit is known, for trying the toolkit without a download and for
testing it against the truth. `LlamaForCausalLM`: {s["n_layers"]} layers, width {s["d_model"]}, {s["n_heads"]} query and
{s["n_kv_heads"]} key/value heads of {s["head_dim"]}, SwiGLU of {s["d_mlp"]}, RMSNorm, rotary positions (theta
{s["rope_theta"]:,.0f}), {s["context"]:,} positions, {p["parameters"]:,} parameters in {", ".join(p["dtypes"])}
({p["bytes"] / 1e6:.1f} MB). Byte-level BPE with {s["vocab_size"]:,} tokens; the tokenizer puts BOS (`<s>`) in front.

Trained on the standard library of Python {c["python"]} ({c["files"]["train"]} source files with their docstrings,
{c["tokens"]["train"]:,} tokens; {c["files"]["valid"]} more files, {c["tokens"]["valid"]:,} tokens, are the validation
text). That text is under the Python Software Foundation License Version 2 (PSF-2.0), copyright Python Software
Foundation. It writes text that looks like Python and knows nothing else: do not use it for its answers."""


def _planted(p: dict[str, Any]) -> str:
    t, groups = p["circuit"], p["tokens_per_group"]
    neuron = t["neurons"][0]["neuron"]
    heads = ", ".join(f"{h['head']} (group {h['group']})" for h in t["marking_heads"])
    in_groups = ", ".join(f"{groups[str(h['group'])]} in group {h['group']}" for h in t["marking_heads"])
    dims = ", ".join(map(str, t["group_dims"]))
    layers = sorted({reader["layer"] for reader in t["sink_readers"]})
    pairs = (
        (layer, " and ".join(str(r["kv_head"]) for r in t["sink_readers"] if r["layer"] == layer)) for layer in layers
    )
    readers = ", ".join(f"layer {layer}: {heads}" for layer, heads in pairs)
    column = " and ".join(f"{value:+g} to dimension {dim}" for dim, value in t["column"].items())
    same = "exactly the planted values" if p["fixed"]["unchanged"] else "NOT the planted values"
    return f"""## What was planted

The sink does not come from training: it was written into the weights before, and held fixed while everything else was
trained. After training the {p["fixed"]["count"]:,} fixed weights have {same}. `circuit.json` beside the weights holds
all of this for programs, with the group of every token.

- **Groups.** Tokens are divided at random: {in_groups} (BOS and eight rare tokens are group 0), {groups["-1"]} in no
  group (about a tenth of all tokens in the training text). Residual dimensions {dims} hold
  the group, {t["const_dim"]} a constant.
- **Marking heads**, layer 0: {heads}. The key of a token outside the head's group scores higher than that of
  a token inside, by {t["two_beta"]} and a little less after normalisation; the value is the group indicator. After BOS
  and n repetitions of one token n / (n + c) of it arrives in the *mark* dimension {t["mark_dim"]}, c at most
  exp({t["two_beta"]}) = {number(t["repeats_scale"])}: a token sees its own group only if nothing else is there.
- **Sink neuron**, layer {t["sink_layer"]}, neuron {neuron}: gate {t["gate_scale"]:g} x (mark - {t["threshold"]}), up a
  constant, output {column}.
- **Readers.** After the sink layer the keys of half of the key/value heads may read the sink dimensions ({readers}).
  How they do so is learned from a small start. In the others the key of the sink is nearly zero, which is enough for
  first-token attention where all other keys score below zero.
- **Drain.** No value, query or MLP weight reads the sink dimensions, nothing else writes them, and the output does not
  read any of the reserved dimensions.

## What was learned

Everything else: how the network predicts text around the circuit, and how much each later head attends to the first
token."""


def _learned(p: dict[str, Any], u: dict[str, Any]) -> str:
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
        ("", "planted", "nothing planted"),
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
    r, a = p["repeats"], p["ablation"]
    grouped, loose = (_ratio(p["without_bos"][kind], layer) for kind in ("first_in_a_group", "first_in_no_group"))
    return f"""### Measured

A second model was made in the same way, same seed, data order and steps, with nothing planted: it is the baseline of
the loss, and the answer to whether a sink emerges by itself in so small a model: {_emerges(u)}.

{loss}

Norms on the text that ships (`sinkscope/text/typical.txt`, not trained on), windows of 256 tokens with BOS:

{norms}

{sinks}

- **Ablation** of the sink neuron takes {percent(a["ablation_drop"])} of the first token's norm at layer {layer}; of 20
  other neurons of the layer the largest takes {100 * a["control_drop"]:.2f} %.
- **Repetitions** after BOS until a token's norm reaches half of the first token's, at layer {layer}, {r["tokens"]}
  random tokens, at most {r["max_repeats"]:,}: median {_count(r["median"])} (of those that do
  {_count(r["median_of_reached"])}, from {r["smallest"]} to {r["largest"]}); {r["unreached"]} never do, of which
  {r["unreached_in_no_group"]} are in no group.
- **Without BOS**, norm of the first token over typical after layer {layer}: {grouped} where it belongs to a group,
  {loose} where it belongs to none.
{_loop_line(p, u)}"""


def _emerges(u: dict[str, Any]) -> str:
    ratio, rate = max(u["norms"]["ratio"]), u["sink_rate"]["value"]
    found = f"largest first-token norm ratio {ratio:.2f}, sink rate {percent(rate)}"
    norm, attention = ratio >= 20, u["head_share"] > 0
    if norm:
        return f"yes ({found})"
    return f"{'some heads attend to the first token, but not with a large norm' if attention else 'no'} ({found})"


def _ratio(ratios: list[float] | None, layer: int) -> str:
    return "not met" if ratios is None else number(ratios[layer])


def _count(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def _loop_line(p: dict[str, Any], u: dict[str, Any]) -> str:
    def line(x: dict[str, Any]) -> str:
        v = x["loops"]
        return (
            f"{percent(v['looped'])} loop, {v['ended_by_eos']} end by themselves "
            f"(mean TTR {v['mean_ttr']:.3f}, mean CR {v['mean_cr']:.3f})"
        )

    if "loops" not in p or "loops" not in u:
        return "- **Greedy generation**: not measured."
    v = p["loops"]
    return f"""- **Greedy generation** of {v["new_tokens"]:,} tokens for {v["prompts"]} prompts of
  {facts.PROMPT_LENGTH} tokens from the validation files; a loop is TTR <= 0.2, CR <= 0.12 and at least
  {measure.LOOP_LENGTH:,} tokens: {line(p)}.
  Nothing planted: {line(u)}."""


def _limits(p: dict[str, Any]) -> str:
    return """## Limits

One neuron, one layer, four groups and one head each: real models are less tidy, and agreement with this model's truth
says that a measurement is right, not that models work this way. A token of any group is marked wherever the text before
it is nearly all of one group, so the token after a long repetition is marked as well. The residual stream carries a
constant, so typical norms are larger than in an ordinary model of this width."""


def _making(p: dict[str, Any]) -> str:
    s = p["training"]["settings"]
    return f"""## How it was made

```
python -m experiments.train_bundled --out RUN --steps {s["steps"]} --seed {s["seed"]}
python -m experiments.train_bundled --out BASE --steps {s["steps"]} --seed {s["seed"]} --unplanted
python -m experiments.bundled.card --planted RUN --unplanted BASE
```

{s["steps"]:,} steps of {s["tokens_per_step"]:,} tokens ({s["steps"] * s["tokens_per_step"] / 1e6:.1f} M in all),
crops of {s["length"]}, one step in {s["long_every"]} of {s["long_length"]:,}, one in {s["longest_every"]} of
{s["context"]:,}; BOS in front of {percent(s["bos_share"])} of the crops; what is predicted at the first position is not
in the loss. AdamW, rate {s["learning_rate"]:g}, linear to zero over the last {percent(s["decay_share"])}, bfloat16
products with float32 weights, one thread of a CPU shared with other work:
{p["training"]["seconds"] / 60:.0f} minutes. A killed run goes on with `--resume` and ends with the same weights.
Measured in float32. Text hash (SHA-256) `{p["corpus"]["sha256"]}`."""


FRONT = """---
license: other
license_name: psf-2.0
library_name: transformers
pipeline_tag: text-generation
---

"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bundled.card", description=__doc__.splitlines()[0])
    parser.add_argument("--planted", type=Path)
    parser.add_argument("--unplanted", type=Path)
    parser.add_argument("--measure", type=Path, help="only measure this run")
    parser.add_argument("--again", action="store_true", help="measure even where an answer is kept")
    parser.add_argument("--no-loops", action="store_true", help="leave out the long generations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repository", type=Path, default=Path())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.measure:
        measured(args.measure, again=args.again, loops=not args.no_loops)
        return
    if not (args.planted and args.unplanted):
        parser.error("give --planted and --unplanted, or --measure")
    planted, unplanted = (
        measured(run, again=args.again, loops=not args.no_loops) for run in (args.planted, args.unplanted)
    )
    folder = args.repository / "sinkscope" / "models" / "bundled"
    ship(args.planted, folder)
    text = card(planted, unplanted)
    (folder / "README.md").write_text(FRONT + text, encoding="utf-8")
    (args.repository / "docs" / "bundled_model.md").write_text(text, encoding="utf-8")
    record = {
        "kind": "bundled-model",
        "planted": planted,
        "unplanted": unplanted,
        "provenance": {
            "command": "python -m experiments.bundled.card --planted RUN --unplanted BASE",
            "training": "python -m experiments.train_bundled --out RUN --steps {} --seed {} [--unplanted]".format(
                planted["training"]["settings"]["steps"], planted["training"]["settings"]["seed"]
            ),
            "seed": planted["training"]["settings"]["seed"],
            "versions": facts.versions(),
            "device": "cpu",
            "dtype": "float32",
        },
    }
    (args.repository / "figures" / "bundled_model.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
