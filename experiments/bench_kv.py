"""What cache policies, observers and the guard cost, compared with the plain model.

    python -m experiments.bench_kv [--out figures/bench_kv.json] [--peer KVPRESS/bin/python] [--only NAME ...]
        [--page PAGE]

Sections, each in a process of its own, on one thread:
- `overhead`: time of `generate` (sampled, so that nothing loops) under `Full` and under an untriggered `LoopGuard`,
  divided by that of plain `generate`; plain over plain shows the noise. The model is a Llama with random weights that
  takes at least 20 ms per token, and, in microseconds per token, the bundled model, there also under evicting policies.
- `decoding`: evicting policies while decoding at equal budget and interval, over the plain model, here and in kvpress
  (`DecodingPress`). kvpress needs another release of transformers, so the same script runs there too (`--peer`, after
  `pip install kvpress==0.5.5 torch==2.13.0 jaxtyping lazy-loader pydantic rich click`), both compare with the plain
  model of their own environment, and only these ratios are compared.

The arms are interleaved in rotating order. A ratio is the median over rounds of arm over plain in the same round, with
a 95 % bootstrap interval. Time is the processor time of the thread that does all the work, because other programs on
the machine disturb it less than wall-clock time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Literal

from experiments.record import Row, earlier, value_of_each, write_record
from experiments.script import run
from experiments.timing import child, interleaved, ratio, token_seconds
from sinkscope.results.console import note

SHAPE = {
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
# prompt tokens, budget, tokens decoded, interval, policies by their name here
DECODING = [
    (1024, 512, 48, 1, ("streaming", "tova")),
    (1024, 512, 129, 128, ("snapkv",)),
    (2048, 1024, 32, 1, ("streaming", "tova")),
]
SECTIONS = ("overhead", "decoding")
Arm = Callable[[], Row]  # seconds by what was done


def llama() -> Any:
    """Random weights; the same architecture in both environments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def tokens(length: int) -> Any:
    import torch

    return torch.randint(5, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))


def ratios(seconds: dict[str, list[Row]]) -> Row:
    """By arm and part, over the plain model in the same round."""
    items: Row = {}
    for name, rounds in seconds.items():
        if name != "plain":
            items[name] = {}
            for part in rounds[0]:
                items[name][part] = ratio(value_of_each(rounds, part), value_of_each(seconds["plain"], part))
    return items


def median_token(rounds: list[Row]) -> float:
    """Seconds of a token."""
    return statistics.median(value_of_each(rounds, "token"))


# --- sections -----------------------------------------------------------------------------------------------------


def overhead(rounds: int) -> Row:
    from transformers.utils import logging

    import sinkscope as ss
    from sinkscope.kv import H2O, TOVA, Full, SnapKV, StreamingLLM
    from sinkscope.loops.guard import LoopGuard

    logging.set_verbosity_error()

    def arms(model: Any, new: int, prompt: int, **policies: Any) -> dict[str, Arm]:
        import torch

        ids = tokens(prompt) % model.config.vocab_size

        def arm(policy: Any) -> Arm:
            seeds = count()  # in each round another text, the same for all arms

            def run() -> Row:
                torch.manual_seed(next(seeds))
                return {"token": token_seconds(model, policy, {"input_ids": ids}, new)[0]}

            return run

        named = {"plain": None, "plain_again": None, "full": Full(), "guard": LoopGuard(), **policies}
        return {name: arm(policy) for name, policy in named.items()}

    big = interleaved(arms(llama(), 32, 32), 4 * rounds)
    bundled: Any = ss.load()
    bundled.generation_config.eos_token_id = None
    evicting = {
        "streaming": StreamingLLM(budget=64),
        "snapkv": SnapKV(budget=96),
        "tova": TOVA(budget=64),
        "h2o": H2O(budget=64),
    }
    small = interleaved(arms(bundled, 128, 128, **evicting), 4 * rounds)
    return {
        "milliseconds_per_token": median_token(big["plain"]) * 1e3,
        "ratio": ratios(big),
        "bundled_microseconds_per_token": {name: median_token(rounds) * 1e6 for name, rounds in small.items()},
        "bundled_ratio": ratios(small),
    }


def decoded(model: Any, ids: Any, prompt: int) -> Row:
    """Seconds for the prompt with the first token after it, and for each further one."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        start = time.thread_time()
        model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1)
        model(ids[:, prompt : prompt + 1], past_key_values=cache, position_ids=torch.tensor([[prompt]]))
        middle = time.thread_time()
        for i in range(prompt + 1, ids.shape[1]):
            model(ids[:, i : i + 1], past_key_values=cache, position_ids=torch.tensor([[i]]))
        end = time.thread_time()
    return {"prompt": middle - start, "token": (end - middle) / (ids.shape[1] - prompt - 1)}


def decoding(rounds: int) -> Row:
    """In either environment: the policies of the one that it has."""
    try:
        import kvpress
    except ImportError:
        kvpress = None
    model = llama()
    out = {}
    for prompt, budget, new, every, names in DECODING:
        ids = tokens(prompt + new + 1)

        def theirs(name: str, prompt: int = prompt, budget: int = budget, every: int = every) -> Any:
            kinds = {"streaming": "StreamingLLMPress", "tova": "TOVAPress", "snapkv": "SnapKVPress"}
            base = getattr(kvpress, kinds[name])(1 - budget / prompt)
            after = kvpress.DecodingPress(base, compression_interval=every, target_size=budget)
            return kvpress.PrefillDecodingPress(base, after)(model)

        def ours(name: str, budget: int = budget, every: int = every) -> Any:
            from sinkscope.kv import policies

            return policies()[name](budget=budget, every=every).on(model)

        def arm(name: str | None, ids: Any = ids, prompt: int = prompt, enter: Any = ours) -> Arm:
            def run() -> Row:
                with nullcontext() if name is None else enter(name):
                    return decoded(model, ids, prompt)

            return run

        enter = theirs
        if kvpress is None:
            enter = ours
        arms = {"plain": arm(None)} | {name: arm(name, enter=enter) for name in names}
        seconds = interleaved(arms, rounds)
        out[f"prompt {prompt}, budget {budget}, every {every}"] = {
            "milliseconds_per_token": {name: median_token(rounds) * 1e3 for name, rounds in seconds.items()},
            "over_plain": ratios(seconds),
        }
    named = ["torch", "transformers"]
    if kvpress is not None:
        named.append("kvpress")
    return {"environment": {name: version(name) for name in named}, "cases": out}


# --- running and merging --------------------------------------------------------------------------------------------


def tables(result: Row) -> str:
    """Times over those of the plain model: of a token under each arm, and of each policy here and in kvpress."""
    from experiments.drawn import markdown  # not in the other environment

    def shown(one: Row) -> str:
        low, high = one["interval"]
        return f"{one['median']:.2f} ({low:.2f} to {high:.2f})"

    overhead = result["overhead"]
    plain = overhead["bundled_microseconds_per_token"]["plain"] / 1000
    big = overhead["milliseconds_per_token"]
    rows = []
    for name, parts in overhead["bundled_ratio"].items():
        other = overhead["ratio"].get(name)
        rows.append([name, shown(parts["token"]), "-" if other is None else shown(other["token"])])
    head = ["", f"model in the package, {plain:.1f} ms a token", f"random weights, {big:.0f} ms a token"]
    tables = [markdown(head, rows)]
    made = result.get("decoding", {})
    if "kvpress" in made:
        rows = []
        slower: dict[str, list[float]] = {"prompt": [], "token": []}
        for case, policies in made["sinkscope"]["cases"].items():
            for name, ours in policies["over_plain"].items():
                theirs = made["kvpress"]["cases"][case]["over_plain"][name]
                rows.append([f"{name}, {case}"])
                for part, values in slower.items():
                    rows[-1] += [shown(ours[part]), shown(theirs[part])]
                    values.append(theirs[part]["median"] / ours[part]["median"])
        head = ["", "sinkscope, prompt", "kvpress, prompt", "sinkscope, token", "kvpress, token"]
        tables.append(markdown(head, rows))
        said = ", ".join(f"{min(values):.2f} to {max(values):.2f} for a {part}" for part, values in slower.items())
        tables.append(f"The ratio of kvpress, divided by ours: {said} (above 1, kvpress takes longer).")
    return "\n\n".join(tables)


def main(
    *,
    peer: str | None = None,
    only: Sequence[Literal[*SECTIONS]] = SECTIONS,
    rounds: int = 9,
    out: Path = Path("figures/bench_kv.json"),
    page: Path | None = None,
    section: Literal[*SECTIONS] | None = None,
) -> None:
    """Make what the module describes.

    Args:
        peer: Python of an environment with kvpress.
        only: Sections; those that are not run stay as they are in the file.
        page: Replace the tables in this page.
        section: Only run this, and print what it found, as the script does itself in processes of their own.
    """
    if section is not None:
        sections = {"overhead": overhead, "decoding": decoding}
        print(json.dumps(sections[section](rounds)))
        return
    for name in only:
        note(name)
        words = ("--section", name, "--rounds", str(rounds))
        made = child("bench_kv", *words)
        if name == "decoding" and peer is not None:
            made = {"sinkscope": made, "kvpress": child("bench_kv", *words, python=peer)}
        result = {**earlier(out), name: made}
        write_record(out, "bench-kv", result, {"shape": SHAPE, "decoding": DECODING})
        if page is not None:
            from experiments.drawn import put_table  # not in the other environment

            put_table(page, "bench_kv", tables(result))


if __name__ == "__main__":
    run(main)
