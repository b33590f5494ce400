"""A plain model with its weights, as transformers reads them from files."""

from __future__ import annotations

import re
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.checkpoint import Files, open_weights
from sinkscope.models.checkpoints.locate import ModelSource
from sinkscope.models.checkpoints.stored import check_unexpected, is_quantised, note_further_layers
from sinkscope.models.loading.config import causal_class
from sinkscope.models.modules.stack import stack_of


def model_with_weights(source: ModelSource, files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files.

    Args:
        source: Where it comes from, for errors.
        files: Its files on this machine.
        config: Its configuration.
        options: What transformers takes beside it.

    Raises:
        SinkscopeError: The weights do not belong to the configuration.
    """
    if files.gguf is not None:
        options = {**options, "gguf_file": files.gguf}
    loaded: Any = causal_class(config).from_pretrained(
        files.folder,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with names
        trust_remote_code=False,
        weights_only=True,  # no code in pickles runs
        **options,
    )
    model, info = loaded
    wrong = sorted(info["missing_keys"]) + [name for name, *_ in sorted(info["mismatched_keys"])]
    if wrong:
        raise SinkscopeError(
            f"{source.name} lacks {len(wrong)} tensors of the shape that its configuration says, such as {wrong[0]}; "
            "the weights belong to another config.json: download both from one revision; or with layers=, "
            f"{config.model_type} cannot be cut to its first layers: leave it out"
        )
    if not is_quantised(config):  # else factors belong there
        check_unexpected(model, info["unexpected_keys"], source.name, {})
    return model.eval()


def check_depth(files: Files, model: Any) -> None:
    """Warn if the files hold more decoder layers than a model that was made of them; only safetensors say so."""
    stack = stack_of(model).removeprefix(f"{model.base_model_prefix}.")
    pattern = re.compile(rf"(?:{model.base_model_prefix}\.)?{re.escape(stack)}\.(\d+)\.(.+)")
    tensors: dict[int, set[str]] = {}
    for file in files.weights():
        if file.suffix == ".safetensors":
            for match in filter(None, map(pattern.fullmatch, open_weights(file).keys())):
                tensors.setdefault(int(match[1]), set()).add(match[2])
    note_further_layers(tensors, model.config.get_text_config().num_hidden_layers, files.name)
