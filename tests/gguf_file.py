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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    # Whole words, which llama.cpp has no form for: they stand in the vocabulary, no text leads to them.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([t if t.startswith("<") else "\u2581" + t for t in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([3 if t.startswith("<") else 1 for t in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
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
