"""A tiny Llama-class model as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(path: Path, model, tokenizer, more: Callable[[Any], object] = lambda _: None, weights: bool = True):
    """Write float32 weights and the vocabulary, as llama.cpp's converter lays them out.

    Args:
        path: The file.
        model: A Llama.
        tokenizer: Its tokenizer.
        more: Adds fields and tensors to the writer.
        weights: Whether there are weights.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    # Whole words, which llama.cpp has no form for: they stand in the vocabulary, no text leads to them.
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "rope_dimension_count": config.head_dim,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10000.0,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "llama",
        "token_list": [token if token.startswith("<") else "\u2581" + token for token in tokens],
        "token_scores": [-float(number) for number in range(len(tokens))],
        "token_types": [3 if token.startswith("<") else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    more(writer)
    for name, tensor in model.state_dict().items() if weights else ():
        array = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # the other convention of rotary pairs
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
