"""Propose where a model keeps its parts: names say places, and sums of one pass say which of several is right.

1. Names say where the parts may be, and the pass which module attends.
2. Where a norm may stand in several places, the first way is taken with which the residual stream is the sum of the
   parts. The sums also measure constant factors.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from accelerate import init_empty_weights

from sinkscope.models.adapters import Adapter, NotInferredError
from sinkscope.models.checkpoints.stream import MAKING
from sinkscope.models.target import LayerInput
from sinkscope.models.weights import experts_of
from sinkscope.opening.proof import Record, read, reads_heads, sums_of

NAMES = {
    "attn": """self_attn linear_attn mamba conv norm_attn_norm.attn attn.attention attention.self attn self_attention
        attention multi_head_attention temporal_block mixer""".split(),
    "mlp": "mlp feed_forward ffn block_sparse_moe mlp_block mixer".split(),
    "mid": """pre_feedforward_layernorm pre_mlp_layernorm pre_ff_layernorm feedforward_layernorm norm_attn_norm.norm_2
        norm_2 ln_2 layernorm2 final_layer_norm ffn_norm mlp_norm channel_pre_norm attention.output.LayerNorm
        post_attention_layernorm""".split(),
    "attn_out": """post_self_attn_layernorm post_attention_layernorm post_norm1 post_operator_norm
        attention.output.dense""".split(),
    "post_mlp_norm": """mlp.post_mlp_layernorm post_mlp_layernorm post_feedforward_layernorm post_norm2
        post_ffn_norm""".split(),
    # in the attention
    "q": "q_proj.linear q_proj q_b_proj Wq query".split(),
    "k": "k_proj.linear k_proj Wk key".split(),
    "v": "v_proj.linear v_proj Wv value".split(),
    "fused_qkv": "qkv_proj query_key_value c_attn Wqkv".split(),
    "o": "o_proj.linear o_proj out_proj dense c_proj Wo attention.output.dense".split(),
    # in the MLP, or in a shared expert
    "down": "down_proj dense_4h_to_h c_proj fc2 w2 fc_out Wo 2 output_linear output.dense".split(),
    "up": "up_proj gate_up_proj dense_h_to_4h c_fc fc1 w3 fc_in Wi 0 input_linear intermediate.dense".split(),
    "gate": "gate_proj w1".split(),
    "shared": "shared_experts shared_expert shared_mlp".split(),
    "shared_gate": ["shared_expert_gate"],
    "norm inside": ["ffn_sub_norm"],  # before the down projection: behind it, no module gives a factor of a neuron
}
"""What parts are called: the first name that is there is taken, but of norms the first with which sums hold."""

Fields = dict[str, Any]
"""What was found of a layer, by the fields of an adapter; None of parts that it does not have."""
_VOCABULARY = 64
_MOST = {
    "intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff": 32,
    "sliding_window|window_size|attention_chunk_size|local_attention|index_topk$": 6,
    "index_topk_blocks|index_block_size": 2,
}
"""Sizes in configurations, and what they are at most in a sample."""


@torch.enable_grad()
def proposed(records: Mapping[int, Record], numbers: Sequence[int]) -> Adapter:
    """Return the adapter that names and sums say of a model.

    Args:
        records: What passed its layers.
        numbers: For each layer of the whole model, the number of the first one of its kind.

    Raises:
        NotInferredError: A part was not found.
    """
    settings: Fields = {}
    placed: dict[int, Fields] = {}
    adds = True
    for layer in {*numbers}:
        paths = _placed(records[layer])
        settings |= _measured(replace(records[layer], paths=paths))
        adds = adds and settings["adds"]
        placed[layer] = {part: path for part, path in paths.items() if path is not None}
    for part, what_it_is in (("o", "softmax attention"), ("mlp", "MLP")):
        if not any(part in paths for paths in placed.values()):
            raise NotInferredError(f"no {what_it_is} was found in its layers")
    settings |= {"adds": adds, "from_any_layer": _is_enough(records[max(records)])}
    return replace(records[0].target.adapter, parts=tuple(placed[number] for number in numbers), **settings)


def _is_enough(record: Record) -> bool:
    """Whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    start = LayerInput(record.layer, record.input_of("").detach(), isinstance(record.outputs[""], tuple))
    with suppress(LookupError, TypeError, ValueError):  # a layer raises what it likes where it gets the stream alone
        records = read(record.target, [record.layer], start)
        return record.is_near(records[record.layer].output_of(""), record.output_of(""))
    return False


# -- one layer ---------------------------------------------------------------------------------------------------------


def _paths(record: Record, part: str, parent: str = "") -> list[str]:
    """The paths at which a layer has modules of the names of a part, below a parent."""
    modules = dict(record.module.named_modules())
    paths = [f"{parent}.{name}".strip(".") for name in NAMES[part]]
    return [path for path in paths if path in modules]


def _first_path(record: Record, part: str, parent: str = "") -> str | None:
    """The first of them; None if there is none."""
    return next(iter(_paths(record, part, parent)), None)


def _named_mlp(record: Record) -> Fields:
    """What names say of the MLP; empty if there is none."""
    block = _first_path(record, "mlp") or ""
    fields: Fields = {}
    modules = dict(record.module.named_modules())
    for path in (f"{block}.experts", block):
        if path in modules and experts_of(modules[path]) is not None:
            fields = {"mlp": block, "experts": path, "shared_gate": _first_path(record, "shared_gate", block)}
    for parent in dict.fromkeys([block, *_paths(record, "shared", block), "", *_paths(record, "shared")]):
        projections: Fields = {part: _first_path(record, part, parent) for part in ("down", "up", "gate")}
        if projections["down"] and projections["up"]:
            if _paths(record, "norm inside", parent):
                projections |= {"up": None, "gate": None}
            return {"mlp": block or parent, **fields, **projections}
    return fields


@dataclass(frozen=True)
class Way:
    """A way to place the norms of a layer, and the module of its MLP.

    Attributes:
        paths: Where all parts are.
        n_unproved: How many sums do not hold.
        explains_middle: Whether it is said what reads the stream between attention and MLP.
        reads_hidden_norm: Whether that may read a norm that no module gives, so that sums need not hold.
    """

    paths: Fields
    n_unproved: int
    explains_middle: bool
    reads_hidden_norm: bool

    @property
    def cost(self) -> int:
        """How bad it is: of two ways without an unproved sum, that which says more is better."""
        if self.n_unproved and self.reads_hidden_norm:
            return len(NAMES)  # worse than all others
        return self.n_unproved + (not self.explains_middle)


def _placed(record: Record) -> Fields:
    """Where a layer has its parts: what names say, and the first way to place norms with which the sums hold."""
    fields = {"": ""} | _named_mlp(record)
    mlp = fields.get("mlp")
    attn = _first_path(record, "attn")
    if record.rows_of(attn) is not None:
        for part in ("q", "k", "v", "fused_qkv", "o"):
            fields[part] = None if attn is None else _first_path(record, part, attn)
        fields["o"] = fields["o"] or _first_path(record, "o")
    if attn != mlp:
        fields["attn"] = attn
    modules_of_mlp = [path for path in (mlp, fields.get("experts"), fields.get("down")) if path]
    places: dict[str, Sequence[str | None]] = {
        "mid": [*_paths(record, "mid"), mlp, None],
        "post_mlp_norm": [*_paths(record, "post_mlp_norm"), None],
        "mlp": [*dict.fromkeys(modules_of_mlp)] or [None],
        "attn_out": [*_paths(record, "attn_out"), None, fields.get("o")],
    }
    ways: list[Way] = []
    for paths in itertools.product(*places.values()):
        ways.append(_way(record, fields | dict(zip(places, paths, strict=True)), mlp))
    return min(ways, key=attrgetter("cost")).paths


def _way(record: Record, paths: Fields, mlp: str | None) -> Way:
    """Try where parts are said to be.

    Args:
        record: What passed the layer.
        paths: The parts.
        mlp: The module of its MLP by its name.
    """
    n_unproved = sum(not total.fit() for total in sums_of(replace(record, paths=paths)))
    middle = paths["mid"]
    is_read_by_a_part = middle is not None and middle in (mlp, paths["attn_out"])
    return Way(paths, n_unproved, middle is not None, is_read_by_a_part)


def _measured(record: Record) -> Fields:
    """What is measured of a layer: factors, and the order of what is in one module."""
    settings: Fields = {}
    up = record.output_of("up")
    post = record.input_of("down")
    for total in sums_of(record):
        factors = total.fit()
        settings |= factors | {"adds": bool(factors)}  # the last one is what leaves the layer
    if [*record.module.buffers(recurse=False)]:  # a factor, other in every layer
        settings["adds"] = False
    if not settings["adds"]:
        settings["write_factor"] = 1.0
    if up is not None and post is not None:
        settings["fused_gate_up"] = up.shape[-1] == 2 * post.shape[-1]
    if record.paths.get("fused_qkv"):
        by_head = replace(record.target.adapter, qkv_layout="by head")
        is_by_head = reads_heads(replace(record, target=replace(record.target, adapter=by_head)), "v")
        settings["qkv_layout"] = "by head" if is_by_head else "beside"
    return settings


# -- the small model ---------------------------------------------------------------------------------------------------


def sample_of(hf: Any, stack: str, depth: int) -> Any:
    """Return a small random model of the class of another one, in float32 on the CPU.

    It has narrow MLPs, and windows of a few tokens.

    Args:
        hf: The other model, whose weights are not read.
        stack: The path of its list of layers.
        depth: The number of its layers that the small one has.
    """
    config = copy.deepcopy(hf.config)
    config._attn_implementation = "eager"
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    for name, value in list(vars(text).items()):
        for pattern, most in _MOST.items():
            if re.search(pattern, name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    with MAKING, init_empty_weights():  # but buffers are made, such as rotary frequencies
        sample: Any = type(hf)(config).eval()
    del sample.get_submodule(stack)[depth:]
    random, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, weight in sample.named_parameters():  # every part gives numbers of about one size
        spread = min(0.5, weight.shape[-1] ** -0.5) if weight.ndim >= 2 else 0.1
        weights[name] = torch.normal(float(weight.ndim < 2), spread, weight.shape, generator=random)
    sample.load_state_dict(weights, strict=False, assign=True)
    return sample.float().requires_grad_(False)
