"""Short names of public models, and where papers found their attention sinks."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import neuron_names

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
TWO_HOPS = "recall-2hop"
"""The recall model with another circuit, which answers over two hops; its weights are made while it is loaded."""
ORGANISM = "organism"
"""Name of the model inside the package whose loops are held by copies in the cache; it repeats nothing else."""


@dataclass(frozen=True)
class PublishedSink:
    """What papers report about a model's sink; layers are 0-based.

    Attributes:
        source: Where it was published.
        layers: Layers whose MLP builds the sink.
        neurons: (layer, neuron) pairs at the input of the down projection.
        residual_dims: Residual dimensions that carry the spike.
        massive_layers: First and last layer after which the spike is in the residual stream.
        repeats: Number of repetitions of a token that create a sink (Yona et al. 2025, Table 1).
        secondary: Whether this comes from another paper's account and was not checked in the original.
        note: Where sources disagree.
    """

    source: str
    layers: tuple[int, ...] = ()
    neurons: tuple[tuple[int, int], ...] = ()
    residual_dims: tuple[int, ...] = ()
    massive_layers: tuple[int, int] | None = None
    repeats: int | None = None
    secondary: bool = False
    note: str = ""

    def shown(self) -> tuple[str, str]:
        """Where the sink is, in words, with the source."""
        parts = [f"layer {', '.join(map(str, self.layers))}"] if self.layers and not self.neurons else []
        if self.neurons:
            parts.append(neuron_names(self.neurons))
        if self.residual_dims:
            parts.append("dims " + ", ".join(map(str, self.residual_dims)))
        return "; ".join(parts) or "-", self.source


@dataclass(frozen=True)
class ModelEntry:
    """A public model: short name, id on the Hugging Face hub, `model_type`, published sink (if any)."""

    name: str
    hub_id: str
    family: str
    published: PublishedSink | None = None


_YONA = "Yona et al. 2025, Table 1"
_YU = "Yu et al. 2024 (arXiv 2411.07191)"
_SUN = "Sun et al. 2024 (arXiv 2402.17762)"
_OWEN = "Owen et al. 2025 (arXiv 2503.22329)"
_ACCOUNTS = "accounts in other papers"
_LLAMA_3 = PublishedSink(f"{_YONA}; {_YU}", (1,), ((1, 198), (1, 2427)), (788, 1384, 4062))
_MISTRAL = PublishedSink(f"{_YONA}; {_YU}", (1,), ((1, 7310), (1, 8572)), (2070, 3398))

_PUBLISHED: dict[str, PublishedSink] = {
    "llama-1-7b": PublishedSink(f"{_YONA}; {_YU}", (2,), ((2, 7003),), (3968,), repeats=450),
    "llama-1-13b": PublishedSink(_YU, (2,), ((2, 2278), (2, 6939)), (2231,), secondary=True),
    "llama-1-30b": PublishedSink(_YU, (3, 10), ((3, 12817), (3, 17439), (10, 14386)), (5633,), secondary=True),
    "llama-2-7b": PublishedSink(
        f"{_YONA}; {_YU}; {_SUN}; {_OWEN}", (1,), ((1, 7890), (1, 10411)), (2533, 1415), (1, 29), repeats=1000
    ),
    "llama-2-13b": PublishedSink(
        _ACCOUNTS, (3,), ((3, 7678),), (4743, 2100), secondary=True, note="sources disagree, another gives neuron 8811"
    ),
    "llama-3-8b": _LLAMA_3,
    "llama-3-8b-instruct": PublishedSink(
        _LLAMA_3.source, _LLAMA_3.layers, _LLAMA_3.neurons, _LLAMA_3.residual_dims, repeats=4000
    ),
    "llama-3.2-1b": PublishedSink(_OWEN, residual_dims=(400,), massive_layers=(1, 14)),
    "llama-3.2-3b": PublishedSink(_OWEN, residual_dims=(588,), massive_layers=(1, 24)),
    "mistral-7b-v0.1": _MISTRAL,
    "mistral-7b-instruct-v0.1": PublishedSink(
        _MISTRAL.source, _MISTRAL.layers, _MISTRAL.neurons, _MISTRAL.residual_dims, repeats=1200
    ),
    "mistral-7b-v0.3": PublishedSink(_OWEN, residual_dims=(2070,), massive_layers=(1, 29)),
    "mixtral-8x7b": PublishedSink(_ACCOUNTS, (1,), residual_dims=(2070, 3398), secondary=True),
    "olmo-7b-0724": PublishedSink(
        _YU, (1, 2, 7, 24), ((1, 7467), (2, 8275), (7, 453), (24, 2300)), (269,), secondary=True
    ),
    "phi-2": PublishedSink(_OWEN, residual_dims=(743,), massive_layers=(2, 23)),
    "phi-3-mini-4k": PublishedSink(_YU, (2, 4), ((2, 808), (4, 2723)), (525, 1693, 1113), secondary=True),
    "phi-4": PublishedSink(_OWEN, residual_dims=(1367, 893), massive_layers=(1, 24)),
    "falcon-7b": PublishedSink(_OWEN, residual_dims=(2002,), massive_layers=(3, 30)),
    "gemma-2-2b": PublishedSink(
        _OWEN, residual_dims=(334, 535), massive_layers=(3, 18), note="none without a beginning-of-sequence token"
    ),
    "gemma-2-9b": PublishedSink(_OWEN, residual_dims=(504,), massive_layers=(0, 34)),
    "gpt2": PublishedSink(_OWEN, residual_dims=(447,), massive_layers=(2, 10)),
    "opt-6.7b": PublishedSink(_OWEN, residual_dims=(2394,), massive_layers=(0, 15)),
}

# short name, hub id; grouped by `model_type`.
_HUB: dict[str, str] = {
    "llama": """
        llama-1-7b huggyllama/llama-7b
        llama-1-13b huggyllama/llama-13b
        llama-1-30b huggyllama/llama-30b
        llama-1-65b huggyllama/llama-65b
        llama-2-7b meta-llama/Llama-2-7b-hf
        llama-2-7b-chat meta-llama/Llama-2-7b-chat-hf
        llama-2-13b meta-llama/Llama-2-13b-hf
        llama-2-13b-chat meta-llama/Llama-2-13b-chat-hf
        llama-2-70b meta-llama/Llama-2-70b-hf
        llama-3-8b meta-llama/Meta-Llama-3-8B
        llama-3-8b-instruct meta-llama/Meta-Llama-3-8B-Instruct
        llama-3-70b meta-llama/Meta-Llama-3-70B
        llama-3.1-8b meta-llama/Llama-3.1-8B
        llama-3.1-8b-instruct meta-llama/Llama-3.1-8B-Instruct
        llama-3.2-1b meta-llama/Llama-3.2-1B
        llama-3.2-1b-instruct meta-llama/Llama-3.2-1B-Instruct
        llama-3.2-3b meta-llama/Llama-3.2-3B
        llama-3.2-3b-instruct meta-llama/Llama-3.2-3B-Instruct
        tinyllama-1.1b TinyLlama/TinyLlama-1.1B-Chat-v1.0
        smollm2-135m HuggingFaceTB/SmolLM2-135M
        smollm2-360m HuggingFaceTB/SmolLM2-360M
        smollm2-1.7b HuggingFaceTB/SmolLM2-1.7B""",
    "mistral": """
        mistral-7b-v0.1 mistralai/Mistral-7B-v0.1
        mistral-7b-instruct-v0.1 mistralai/Mistral-7B-Instruct-v0.1
        mistral-7b-instruct-v0.2 mistralai/Mistral-7B-Instruct-v0.2
        mistral-7b-v0.3 mistralai/Mistral-7B-v0.3
        mistral-7b-instruct-v0.3 mistralai/Mistral-7B-Instruct-v0.3""",
    "mixtral": """
        mixtral-8x7b mistralai/Mixtral-8x7B-v0.1
        mixtral-8x7b-instruct mistralai/Mixtral-8x7B-Instruct-v0.1""",
    "gpt_neox": """
        pythia-70m EleutherAI/pythia-70m
        pythia-160m EleutherAI/pythia-160m
        pythia-410m EleutherAI/pythia-410m
        pythia-1b EleutherAI/pythia-1b
        pythia-1.4b EleutherAI/pythia-1.4b
        pythia-2.8b EleutherAI/pythia-2.8b
        pythia-6.9b EleutherAI/pythia-6.9b
        pythia-12b EleutherAI/pythia-12b""",
    "gpt2": """
        gpt2 openai-community/gpt2
        gpt2-medium openai-community/gpt2-medium
        gpt2-large openai-community/gpt2-large
        gpt2-xl openai-community/gpt2-xl""",
    "opt": """
        opt-125m facebook/opt-125m
        opt-350m facebook/opt-350m
        opt-1.3b facebook/opt-1.3b
        opt-2.7b facebook/opt-2.7b
        opt-6.7b facebook/opt-6.7b
        opt-13b facebook/opt-13b""",
    "falcon": """
        falcon-7b tiiuae/falcon-7b
        falcon-7b-instruct tiiuae/falcon-7b-instruct
        falcon-40b tiiuae/falcon-40b""",
    "phi": """
        phi-1.5 microsoft/phi-1_5
        phi-2 microsoft/phi-2""",
    "phi3": """
        phi-3-mini-4k microsoft/Phi-3-mini-4k-instruct
        phi-3-medium-4k microsoft/Phi-3-medium-4k-instruct
        phi-4 microsoft/phi-4""",
    "qwen2": """
        qwen2-0.5b Qwen/Qwen2-0.5B
        qwen2-1.5b Qwen/Qwen2-1.5B
        qwen2-7b Qwen/Qwen2-7B
        qwen2.5-0.5b Qwen/Qwen2.5-0.5B
        qwen2.5-1.5b Qwen/Qwen2.5-1.5B
        qwen2.5-3b Qwen/Qwen2.5-3B
        qwen2.5-7b Qwen/Qwen2.5-7B
        qwen2.5-7b-instruct Qwen/Qwen2.5-7B-Instruct""",
    "qwen3": """
        qwen3-0.6b Qwen/Qwen3-0.6B
        qwen3-1.7b Qwen/Qwen3-1.7B
        qwen3-4b Qwen/Qwen3-4B
        qwen3-8b Qwen/Qwen3-8B
        qwen3-14b Qwen/Qwen3-14B""",
    "qwen2_moe": """
        qwen1.5-moe-a2.7b Qwen/Qwen1.5-MoE-A2.7B""",
    "glm4_moe": """
        glm-4.5-air zai-org/GLM-4.5-Air""",
    "qwen3_moe": """
        qwen3-30b-a3b Qwen/Qwen3-30B-A3B""",
    "gemma": """
        gemma-2b google/gemma-2b
        gemma-7b google/gemma-7b""",
    "gemma2": """
        gemma-2-2b google/gemma-2-2b
        gemma-2-9b google/gemma-2-9b
        gemma-2-27b google/gemma-2-27b""",
    "gemma3_text": """
        gemma-3-270m google/gemma-3-270m
        gemma-3-1b google/gemma-3-1b-pt
        gemma-3-1b-it google/gemma-3-1b-it""",
    "gemma3": """
        gemma-3-4b google/gemma-3-4b-pt
        gemma-3-4b-it google/gemma-3-4b-it""",
    "olmo": """
        olmo-1b allenai/OLMo-1B-hf
        olmo-7b allenai/OLMo-7B-hf
        olmo-7b-0724 allenai/OLMo-7B-0724-hf""",
    "olmo2": """
        olmo-2-1b allenai/OLMo-2-0425-1B
        olmo-2-7b allenai/OLMo-2-1124-7B
        olmo-2-13b allenai/OLMo-2-1124-13B""",
    "gpt_oss": """
        gpt-oss-20b openai/gpt-oss-20b
        gpt-oss-120b openai/gpt-oss-120b""",
}

_ENTRIES: dict[str, ModelEntry] = {
    name: ModelEntry(name, hub_id, family, _PUBLISHED.get(name))
    for family, lines in _HUB.items()
    for name, hub_id in (line.split() for line in lines.strip().splitlines())
}


def models() -> list[ModelEntry]:
    """Every model with a short name, family by family."""
    return list(_ENTRIES.values())


def find(name: str) -> ModelEntry | None:
    """A model by its short name, its hub id, or the last part of a hub id or path; case does not matter."""
    wanted = name.strip().rstrip("/").lower()
    last = wanted.replace("\\", "/").rpartition("/")[2]
    exact = (e for e in _ENTRIES.values() if wanted in (e.name, e.hub_id.lower()))
    loose = (e for e in _ENTRIES.values() if last in (e.name, e.hub_id.lower().rpartition("/")[2]))
    return next(exact, None) or next(loose, None)


def resolve(name: str) -> str:
    """Hub id of a short name (`llama-2-7b`), or of the last part of a hub id (`Llama-2-7b-hf`).

    Raises:
        SinkscopeError: The name is unknown; the message lists the closest short names.
    """
    if "/" not in name and (entry := find(name)) is not None:
        return entry.hub_id
    near = difflib.get_close_matches(name.lower(), _ENTRIES, n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise SinkscopeError(
        f"unknown model {name!r}: {meant}Expected a short name (`sinkscope models` lists them), a hub id such as "
        "org/name, a folder such as ./my-model, or a .gguf file",
        page="unknown-name",
    )


def published_for(name_or_id: str) -> PublishedSink | None:
    """What papers report about a model's sink, by short name, hub id or base name of a folder; None if nothing."""
    entry = find(name_or_id)
    return entry.published if entry is not None else None
