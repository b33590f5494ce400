"""Configuration and tokenizer of a checkpoint in a folder, checked before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.models.adapters import adapter_for
from sinkscope.models.checkpoint import read_json
from sinkscope.models.checks import check_kind

_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # lists in a config with an entry per layer
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(
    name: str, folder: Path, *, gguf: str | None = None, layers: int | None = None, trust_remote_code: bool = False
) -> Any:
    """The configuration of a causal language model that has an adapter and at least one layer.

    Args:
        name: of the model, for errors.
        folder: where config.json is, or the GGUF file.
        gguf: name of that file.
        layers: cut it to so many decoder layers.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        SinkscopeError: it is no configuration, or has no layers, or fewer than asked for.
        UnsupportedError: another kind of model, or no adapter.
    """
    from transformers import AutoConfig

    config: Any
    if gguf is None:
        check_kind(name, read_json(folder / "config.json"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    else:
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
        adapter_for(config.model_type)
    text = config.get_text_config()
    n_layers = text.num_hidden_layers
    if n_layers < 1:
        raise SinkscopeError(
            f"{name} has zero layers (num_hidden_layers is {n_layers} in its config.json); give a model that has some",
            page="zero-layers",
        )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"  # some versions of transformers choose SDPA, which drops the soft cap
    if layers is not None:
        if layers > n_layers:
            raise SinkscopeError(
                f"layers={layers} is more than {name} has; expected at most {n_layers}", page="zero-layers"
            )
        text.num_hidden_layers = layers
        for field in _PER_LAYER:
            if isinstance(per_layer := getattr(text, field, None), list):
                setattr(text, field, per_layer[:layers])
    return config


def read_tokenizer(name: str, folder: Path, *, gguf: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside the weights, or in the GGUF file; None if there is none.

    Raises:
        SinkscopeError: its files cannot be read.
    """
    from transformers import AutoTokenizer

    if gguf is not None:
        return AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    if not any((folder / file).is_file() for file in _VOCABULARIES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        first = (str(error).splitlines() or [""])[0]
        if "custom code" in str(error):
            raise SinkscopeError(
                f"the tokenizer of {name} is code of its own, which is not run; give another with tokenizer=..., or, "
                "if you trust it, trust_remote_code=True in Python",
                page="no-tokenizer",
            ) from None
        raise SinkscopeError(
            f"the tokenizer of {name} cannot be read ({type(error).__name__}: {first}); download its files again, or "
            "give tokenizer=...",
            page="no-tokenizer",
        ) from error
