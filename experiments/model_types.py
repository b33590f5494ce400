"""Which decoder types of transformers are served: builds each one small, examines it, and writes the table of the docs.

    python -m experiments.model_types [TYPE ...]

Writes figures/model_types.json (types that are named replace their entries) and figures/model_types.md, and prints the
sentences for docs/models.md.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.record import Row, earlier, write_record
from experiments.script import run as run_script

ROOT = Path(__file__).parents[1]
DATA = ROOT / "figures/model_types.json"
PAGE = ROOT / "docs/models.md"
TYPES_PAGE = ROOT / "figures/model_types.md"
NO_DECODERS = set(  # encoders and decoders of encoder-decoder models, which the mapping lists as well
    """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text
    electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta
    roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-prophetnet xlm-roberta xlm-roberta-xl xlnet
    xmod""".split()
)
COVERING = (  # each has something that those before it do not have
    # windows, shared experts, latent attention, norms behind, factors, convolutions, linear attention, per-layer inputs
    "cohere2 afmoe deepseek_v2 exaone4 granite_swa lfm2_moe qwen3_next gemma4_text "
    # experts in other layouts or beside a shared one; chunks; layers of one part each; parts in some layers
    "gpt_oss llama4_text granitemoeshared axk1 nemotron_h olmo_hybrid beam "
    # positions by ALiBi, by addition, or none; attention inside modules; one module for q, k and v; norms at the
    # end of layers; attention in two halves; learned sinks in some layers
    "bloom biogpt gptj mpt gpt_bigcode gpt_neo gpt_neox_japanese git diffllama mimo_v2_flash "
    # indexers; state and keys in one layer; parallel parts; a norm inside the MLP; multipliers; a text model inside
    "deepseek_v32 minimax_m3_vl_text falcon_h1 phi bitnet minicpm3 aria_text smollm3 recurrent_gemma"
).split()
"""Types of which the default tests examine every sixth in full."""
TABLE = """# Types of decoders

Behind [is my model served?](../docs/models.md), which says what the words mean; transformers {version}.

In full, in all layers: {whole}.

Where layers share keys, as in Gemma 3n and some of Gemma 4, cache policies, guards and observers are refused, too.

| types | served | remarks |
|---|---|---|
"""
_NO_ROW = re.compile(r"the parts of model type '[\w-]+' are not where names say: ")
_CLASS = re.compile(r" of \w+ForCausalLM")
_TYPE = re.compile(r"a model of type '[\w-]+'")


sys.path.append(str(ROOT / "tests"))  # where the small models are


def types() -> list[str]:
    """Decoder types of the installed version of transformers."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NO_DECODERS]


def entry(model_type: str) -> Row | None:
    """What was found of a type; None if it cannot be built small."""
    from organisms.decoders import decoder
    from organisms.examine import examine

    try:
        model = decoder(model_type)
    except Exception as error:
        print(f"{model_type} cannot be built: {error}", file=sys.stderr)
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > 30_000_000:
        return None
    report = examine(model_type)
    return {"status": report.status, **vars(report)}


def remark(found: Row) -> str:
    """The last column: reasons of refusals, or which layers are served."""
    reasons = list(dict.fromkeys(reason for reason in found["parts"].values() if reason))
    reasons += found["wrong"]
    if not reasons and "all layers; attention in all layers; cache policies and guards in all" not in found["scope"]:
        return found["scope"]
    shortened = []
    for reason in reasons:
        short = reason.partition("; if it has them")[0]
        shortened.append(_TYPE.sub("it", _CLASS.sub("", _NO_ROW.sub("", short))).partition(": use another model")[0])
    return "; ".join(shortened).replace("|", "\\|")


def sentences(types: Row) -> list[str]:
    """What the page of the docs says of all types."""
    counts = Counter(found["status"] for found in types.values())
    served = [entry["sites"] for entry in types.values() if entry["sites"]]
    right = sum(one["right"] for one in served)
    lacking = sum(len(one["not offered"]) for one in served)
    wrong = sum(line.startswith("site ") for entry in types.values() for line in entry["wrong"])
    return [
        f"Of the {len(types)} types, {counts['in full']} are served in full, {counts['in part']} in part, and "
        f"{counts['refused']} are refused in one line.",
        f"of the {len(served)} types that are served, {right:,} sites are right and {wrong} wrong; {lacking} kinds "
        "of sites, counted over the types, are not offered.",
    ]


def types_page(data: Row) -> str:
    """The page with all types."""
    whole = list[str]()
    rows: dict[tuple[str, str], list[str]] = {}
    for model_type, found in sorted(data["types"].items()):
        if found["status"] == "in full" and not remark(found):
            whole.append(f"`{model_type}`")
        else:
            rows.setdefault((found["status"], remark(found)), []).append(f"`{model_type}`")
    table = TABLE.format(version=data["transformers"], whole=", ".join(whole))
    for (status, said), names in sorted(rows.items()):
        table += f"| {', '.join(names)} | {status} | {said} |\n"
    return table


def main(names: Sequence[str] = ()) -> None:
    """Examine the types and write what was found.

    Args:
        names: Types; default: all.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for model_type in names or types():
        found = entry(model_type)
        if found is None:
            continue
        data: Row = {"types": {}} | earlier(DATA)  # read again, because several processes may share the types
        data["transformers"] = transformers.__version__
        data["types"][model_type] = found
        print(f"{model_type}: {found['status']} {'; '.join(found['wrong'])}")
        data["types"] = dict(sorted(data["types"].items()))
        write_record(DATA, "model-types", data, {})
    print(*sentences(earlier(DATA)["types"]), sep="\n")
    TYPES_PAGE.write_text(types_page(earlier(DATA)))


if __name__ == "__main__":
    run_script(main)
