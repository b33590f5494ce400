"""Which decoder types of transformers are served: builds each one small, examines it, and writes the table of the docs.

    python -m experiments.model_types [TYPE ...]

Writes figures/model_types.json (types that are named replace their entries) and docs/models.md.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.record import record

ROOT = Path(__file__).parents[1]
DATA = ROOT / "figures/model_types.json"
PAGE = ROOT / "docs/models.md"
NO_DECODERS = set(  # encoders and decoders of encoder-decoder models, which the mapping lists as well
    """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text
    electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta
    roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-prophetnet xlm-roberta xlm-roberta-xl xlnet
    xmod""".split()
)
INTRODUCTION = """# Is my model served?

`sinkscope models --check MODEL` answers for one model: it prints the adapter, the figures of the proof, and what is
served.

The table below was made with transformers {version} by `python -m experiments.model_types`. Each decoder type was made
as a random model of a few layers, with the multipliers, windows, mixtures and hybrid layers that released checkpoints
have. Forms of checkpoints are not part of the table: weights that are quantised without a `quantization_config`,
tensors for which the configuration has no place, and adapters (LoRA) are refused in one line that says what to do
([errors](errors/index.md)). A type is **in full** if

- a planted sink neuron is ranked first, live and from a folder, and its contribution equals an independent ablation;
- attention rows equal those of the model's own eager attention within 1e-4, on a text longer than every window;
- under `Full`, `generate` gives the tokens of the plain model, and H2O, StreamingLLM, LoopGuard and LoopServe run;
- weights, configuration and hooks are left as they were.

**In part** means that everything the last column does not name passed. Of a model with layers of several kinds, the
last column says in which layers there is attention, and on which a cache policy acts.

A type that is not in the table was not measured for it; ask `--check`. Of the {total} types in it, {full} are served
in full, {part} in part, and {refused} are refused in one line.{wrong}

| type | served | remarks |
|---|---|---|
"""


def types() -> list[str]:
    """Decoder types of the installed version of transformers."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NO_DECODERS]


def entry(model_type: str) -> dict[str, Any] | None:
    """What was found of a type; None if it cannot be built small."""
    from tests.organisms.decoders import decoder
    from tests.organisms.examine import examine

    try:
        model = decoder(model_type)
    except Exception as error:
        print(f"{model_type} cannot be built: {type(error).__name__}: {error}"[:160], file=sys.stderr)
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > 30_000_000:
        return None
    report = examine(model_type)
    return {"status": report.status, "parts": report.parts, "wrong": report.wrong, "scope": report.scope}


def remark(found: dict[str, Any]) -> str:
    """The last column: reasons of refusals, or which layers are served."""
    reasons = list(dict.fromkeys(reason for reason in found["parts"].values() if reason))
    reasons += found["wrong"]
    if not reasons and "all layers; attention in all layers; cache policies and guards in all" not in found["scope"]:
        return found["scope"]
    shortened = [reason.partition("; write one with")[0].partition("; change what is wrong")[0] for reason in reasons]
    return "; ".join(shortened).replace("|", "\\|")


def page(data: dict[str, Any]) -> str:
    """The page of the docs."""
    counts = Counter(found["status"] for found in data["types"].values())
    wrong = f" {counts['wrong']} give a wrong number." if counts["wrong"] else ""
    text = INTRODUCTION.format(
        version=data["transformers"],
        total=len(data["types"]),
        full=counts["in full"],
        part=counts["in part"],
        refused=counts["refused"],
        wrong=wrong,
    )
    for model_type, found in sorted(data["types"].items()):
        text += f"| `{model_type}` | {found['status']} | {remark(found)} |\n"
    return text


def main(chosen: list[str]) -> None:
    """Examine the types and write both files."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for model_type in chosen or types():
        found = entry(model_type)
        if found is None:
            continue
        data: dict[str, Any] = {"types": {}}
        if DATA.is_file():  # read again, because several processes may share the types
            data = json.loads(DATA.read_text())["result"]
        data["transformers"] = transformers.__version__
        data["types"][model_type] = found
        print(f"{model_type}: {found['status']} {'; '.join(found['wrong'])}", flush=True)
        data["types"] = dict(sorted(data["types"].items()))
        DATA.write_text(record("model-types", data, {}))
    PAGE.write_text(page(json.loads(DATA.read_text())["result"]))


if __name__ == "__main__":
    main(sys.argv[1:])
