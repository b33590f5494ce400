"""Write tokenizer, weights and the planted truth the way they ship."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.bundled.circuit import Plan, truth
from experiments.bundled.corpus import BOS, EOS, PAD


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    # transformers 5 writes a class name that version 4 does not know; both know this one.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_circuit(plan: Plan, folder: Path, seed: int) -> None:
    (folder / "circuit.json").write_text(json.dumps(truth(plan, seed)) + "\n")


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id, pad_token_id=2, do_sample=False
    )
    model.config.pad_token_id = 2
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder, safe_serialization=True)
