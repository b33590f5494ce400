"""Ablate and what every intervention shares: where it acts, what it leaves behind, who it concerns."""

from __future__ import annotations

import copy
import runpy
import threading
from pathlib import Path

import pytest
import torch
from covering import every_nth
from hypothesis import given, settings
from hypothesis import strategies as st
from intervention_kit import bridge_of, count_hooks, logits, nnsight_of, residual_norms, set_values
from organisms import MODEL_TYPES, organism, tiny_model
from torch import Tensor
from torch.testing import assert_close

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions import Ablate, SinkPatch
from sinkscope.interventions.positions import Tracker
from sinkscope.models.wrapped import target_of

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
SHARED = {"qwen2_moe": "mlp.shared_expert", "glm4_moe": "mlp.shared_experts"}
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", *SHARED)
KINDS = {"hf": lambda m, t: m, "bridge": bridge_of, "nnsight": nnsight_of}


def sites_for(model_type: str) -> list[tuple[int, ...]]:
    if model_type in EXPERTS:
        routed = [(1, expert, neuron) for expert in range(4) for neuron in (3, 11)]
        return routed + ([(1, 3), (2, 40)] if model_type in SHARED else [])  # 40: more than a routed expert has
    return [(1, 3), (1, 11), (2, 0)]


def zeroed_copy(model, sites: list[tuple[int, ...]]):
    """The same model with these neurons' columns of the down projection set to zero: no hook involved."""
    edited = copy.deepcopy(model)
    target = target_of(edited)
    for layer, *expert, neuron in sites:
        if expert:
            weight = target.sub(layer, "mlp.experts").down_proj.data[expert[0]]
            (weight if target.config.model_type == "gpt_oss" else weight.T)[neuron] = 0
        else:
            path = SHARED.get(target.config.model_type)
            weight = target.sub(layer, target.adapter.down if path is None else f"{path}.down_proj").weight.data
            (weight if target.adapter.transposed_down else weight.T)[neuron] = 0
    return edited


# --- the mechanism, against edited weights -------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", every_nth(MODEL_TYPES, 4, 3))
def test_zero_ablation_equals_zeroed_weights(model_type):
    """On the plain model, through a bridge, and as TransformerLens' own hooks."""
    # TransformerLens cannot take apart the fused attention of Falcon's newer layout.
    older = {"new_decoder_architecture": False, "multi_query": True} if model_type == "falcon" else {}
    model, tokenizer = tiny_model(model_type, **older)
    sites = sites_for(model_type)
    want = logits(zeroed_copy(model, sites), IDS)
    assert (want - logits(model, IDS)).abs().max() > 1e-3
    edit = Ablate(sites=sites)
    with edit.on(model):
        assert_close(logits(model, IDS), want, atol=2e-5, rtol=1e-4)
    bridge = bridge_of(model, tokenizer)
    with edit.on(bridge):
        assert_close(bridge(IDS), want, atol=1e-4, rtol=1e-3)
    if model_type not in EXPERTS:
        assert_close(bridge.run_with_hooks(IDS, fwd_hooks=edit.fwd_hooks(bridge)), want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("model_type", ["phi3"])
def test_up_edits_the_linear_factor(model_type):
    model, tokenizer = tiny_model(model_type)
    with set_values(model, layer=1, neurons=[3], column=2, value=0.5, site="up"):
        want = logits(model, IDS)
    edit = Ablate(layer=1, neurons=[3], value=0.5, positions=2, site="up")
    with edit.on(model):
        assert_close(logits(model, IDS), want)
    with Ablate(layer=1, neurons=[3], value=0.5, positions=2).on(model):
        assert (logits(model, IDS) - want).abs().max() > 1e-4
    bridge = bridge_of(model, tokenizer)
    with edit.on(bridge):
        assert_close(logits(bridge, IDS), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("model_type", EXPERTS)
def test_up_factor_of_an_expert(model_type):
    """Reference: the rows that compute the factor, replaced by a constant through the weights (and bias, or 0)."""
    model, _ = tiny_model(model_type)
    edited = copy.deepcopy(model)
    experts = edited.model.layers[1].mlp.experts
    value = 0.0
    if model_type == "gpt_oss":
        experts.gate_up_proj.data[2, :, 2 * 5 + 1] = 0
        experts.gate_up_proj_bias.data[2, 2 * 5 + 1] = value = 0.8
    else:
        experts.gate_up_proj.data[2, experts.intermediate_dim + 5] = 0
    with Ablate(sites=[(1, 2, 5)], value=value, site="up").on(model):
        assert_close(logits(model, IDS), logits(edited, IDS), atol=2e-5, rtol=1e-4)


def test_edits_of_one_expert_neuron_follow_each_other():
    """The second edit sees what the first one left, in one run and in nested runs."""
    model, _ = tiny_model("mixtral")
    site = [(1, 0, 3)]
    first, second = Ablate(sites=site, value=2.0), Ablate(sites=site, value=-1.0, positions=1)
    with (
        Ablate(sites=site, value=2.0, positions=slice(2, None)).on(model),
        Ablate(sites=site, value=2.0, positions=0).on(model),
        Ablate(sites=site, value=-1.0, positions=1).on(model),
    ):
        want = logits(model, IDS)
    with (first | second).on(model):
        assert_close(logits(model, IDS), want, atol=1e-5, rtol=1e-4)
    with first.on(model), second.on(model):
        assert_close(logits(model, IDS), want, atol=1e-5, rtol=1e-4)


def test_mean_ablation():
    model, _ = tiny_model("llama")
    seen = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _m, a: seen.append(a[0]))
    logits(model, IDS)
    handle.remove()
    mean = seen[-1][:, 1:, 3].mean(1)  # per row, without the first token
    edited = seen[-1].clone()
    edited[:, :, 3] = mean[:, None]
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _m, a: (edited,))
    want = logits(model, IDS)
    handle.remove()
    with Ablate(layer=1, neurons=[3], value="mean").on(model):
        assert_close(logits(model, IDS), want)


# --- a written value: is the neuron sufficient? ----------------------------------------------------------------


def test_writing_makes_a_sink_where_it_is_written():
    o = organism("gemma2", 3)
    ids, where = o.natural(1, 24), 9
    layer = o.truth.sink_layer
    values = {}
    for site in o.truth.neurons:  # the value that each sink neuron has at the first token
        with Ablate(sites=[site], positions="first").on(o.model) as run:
            residual_norms(o.model, ids, layer)
        values[site] = run.events[0].data["old"]
    before = residual_norms(o.model, ids, layer)
    edits = [Ablate(sites=[site], value=value, positions=where) for site, value in values.items()]
    whole = edits[0]
    for edit in edits[1:]:
        whole = whole | edit
    with whole.on(o.model) as run:
        after = residual_norms(o.model, ids, layer)
    assert after[0, where] > 0.5 * after[0, 0] > 5 * before[0, where]
    others = [p for p in range(24) if p != where]
    assert_close(after[0, others], before[0, others], atol=1e-3, rtol=1e-3)
    assert {(e.position, e.kind) for e in run.events} == {(where, "ablated")}


def test_positions_count_real_tokens():
    model, _ = tiny_model("llama")
    ids = torch.tensor([[3, 3, 1, 5, 6, 7], [1, 8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for wanted, rows in {"first": [(0, 0), (1, 0)], 5: [(1, 5)], (1, 4): [(0, 1), (1, 1), (1, 4)]}.items():
        with Ablate(layer=0, neurons=[2], value=99.0, positions=wanted).on(model) as run:
            model(ids, attention_mask=mask)
        assert [(e.row, e.position) for e in run.events] == rows
    with Ablate(layer=0, neurons=[2], value=99.0, positions=slice(1, 5, 2)).on(model) as run:
        model(ids, attention_mask=mask)
    assert [(e.row, e.position) for e in run.events] == [(0, 1), (0, 3), (1, 1), (1, 3)]


# --- positions: every way of calling, against counting by hand -----------------------------------------------------


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), max_size=4),
    left=st.booleans(),
    masked=st.sampled_from(["2d", "4d", "dict", "float"]),
)
def test_true_positions_of_padded_chunks(lengths, cuts, left, masked):
    width = max(lengths)
    real = torch.zeros(len(lengths), width, dtype=torch.bool)
    want = torch.full((len(lengths), width), -1)
    for row, n in enumerate(lengths):
        part = slice(width - n, width) if left else slice(0, n)
        real[row, part] = True
        want[row, part] = torch.arange(n)
    tracker, cache = Tracker(target_of(tiny_llama())), FakeCache()
    got, start = [], 0
    for size in [*cuts, width]:
        stop = min(width, start + size)
        if stop == start:
            break
        call = tracker.begin(
            torch.full((len(lengths), stop - start), 7), None, shape_mask(real, start, stop, masked), cache
        )
        got.append(call.index)
        cache.seen = start = stop
    assert torch.equal(torch.cat(got, 1), want)
    # A token without mask comes after all real ones.
    call = tracker.begin(torch.full((len(lengths), 1), 7), None, None, cache)
    assert call.index.flatten().tolist() == lengths


class FakeCache:
    seen = 0

    def get_seq_length(self) -> int:
        return self.seen


def shape_mask(real: Tensor, start: int, stop: int, kind: str):
    if kind == "2d":
        return real[:, :stop].long()
    causal = torch.arange(stop)[None, :] <= torch.arange(start, stop)[:, None]
    square = (real[:, None, None, :stop] & causal[None, None]) & True
    if kind == "dict":
        return {"sliding_attention": torch.zeros(1, 1, 1, 1), "full_attention": square}
    return torch.where(square, 0.0, torch.finfo(torch.float32).min) if kind == "float" else square


_TINY = []


def tiny_llama():
    if not _TINY:
        _TINY.append(tiny_model("llama")[0])
    return _TINY[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=lambda s: "-".join(s) or "plain",
)
def test_every_generated_position_is_edited_once(settings):
    """The k-th token of a row is at k however generation calls the model; each position from 3 on is seen."""
    model, _ = tiny_model("llama")
    single = "prompt_lookup_num_tokens" in settings
    ids = torch.tensor([[1, 5, 6, 7, 5, 6]]) if single else torch.tensor([[3, 3, 1, 5, 6, 7], [1, 8, 9, 10, 11, 12]])
    mask = torch.ones_like(ids) if single else torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    reads = [int(n) for n in mask.sum(1)]
    settings = {"do_sample": False, **settings}
    with Ablate(layer=1, neurons=[3], value=50.0, positions=slice(3, None)).on(model) as run:
        model.generate(ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None, pad_token_id=3, **settings)
    times = settings.get("num_beams", 1) * settings.get("num_return_sequences", 1)
    for row, n in enumerate(r for r in reads for _ in range(times)):
        assert {e.position for e in run.events if e.row == row} == set(range(3, n + 4))  # the last one is never read


# --- leaves no trace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_trace_after_exit_and_exception(kind):
    model, tokenizer = tiny_model("llama")
    model = KINDS[kind](model, tokenizer)
    hf = target_of(model).hf
    want = logits(model, IDS)  # first: a bridge hangs some hooks of its own on at its first call
    before, state = count_hooks(hf), sorted(hf.__dict__)
    edit = SinkPatch(layer=1, neurons=[3]) | Ablate(layer=2, neurons=[0])
    with edit.on(model):
        assert count_hooks(hf) > before
        with edit.on(model):
            logits(model, IDS)
    with pytest.raises(ZeroDivisionError), edit.on(model):
        logits(model, IDS)
        raise ZeroDivisionError
    with pytest.raises(SinkscopeError), (edit | Ablate(layer=1, neurons=[10**6])).on(model):
        pass
    with pytest.raises((IndexError, RuntimeError)), edit.on(model):
        logits(model, torch.tensor([[10**6]]))
    assert count_hooks(hf) == before and sorted(hf.__dict__) == state
    assert torch.equal(logits(model, IDS), want)


def test_nested_runs_restart_from_their_own_prompt():
    model, _ = tiny_model("llama")
    edit = Ablate(layer=1, neurons=[3], value=50.0, positions=1)
    with edit.on(model) as outer:
        logits(model, IDS)
        with edit.on(model) as inner:
            logits(model, IDS)
    # The inner run, entered later, acts later: it finds the value already there.
    assert [e.step for e in outer.events] == [0, 0, 1, 1] and inner.events == []


# --- threads -------------------------------------------------------------------------------------------------------


def test_two_threads_with_runs_of_their_own_do_not_meet():
    model, _ = tiny_model("llama")
    edits = [Ablate(layer=1, neurons=[3], value=v) for v in (5.0, -5.0)]
    want = []
    for edit in edits:
        with edit.on(model):
            want.append(logits(model, IDS))
    gate, got, steps = threading.Barrier(2, timeout=60), {}, {}

    def work(i):
        with edits[i].on(model) as run:
            gate.wait()
            for _ in range(5):
                got[i] = logits(model, IDS)
            gate.wait()
            steps[i] = len({e.step for e in run.events})

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert steps == {0: 5, 1: 5} and count_hooks(model) == 0


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "edit", "words"),
    [
        ("llama", Ablate(layer=3, neurons=[0]), ["layer 3", "0 to 2"]),
        ("llama", Ablate(sites=[(1, 0, 3)]), ["without experts", "(layer, neuron)"]),
        ("mixtral", Ablate(sites=[(1, 3)]), ["mixture", "(layer, expert, neuron)"]),
        ("mixtral", Ablate(sites=[(1, 4, 3)]), ["expert 4", "0 to 3"]),
        ("qwen3_moe", Ablate(sites=[(1, 0, 32)]), ["neuron 32", "0 to 31"]),
        ("gpt2", Ablate(layer=1, neurons=[0], site="up"), ["no gate", 'site="post"']),
    ],
)
def test_sites_that_a_model_does_not_have(model_type, edit, words):
    model, _ = tiny_model(model_type)
    with pytest.raises(SinkscopeError) as caught, edit.on(model):
        pass
    assert all(word in str(caught.value) for word in words)


def test_fwd_hooks_says_where_it_cannot():
    model, tokenizer = tiny_model("mixtral")
    with pytest.raises(UnsupportedError, match=r"on\(model\)"):
        Ablate(sites=[(1, 0, 3)]).fwd_hooks(model)
    with pytest.raises(UnsupportedError, match=r"L1\.E0\.N3.*on\(bridge\)"):
        Ablate(sites=[(1, 0, 3)]).fwd_hooks(bridge_of(model, tokenizer))


def test_nnsight_model_without_weights_is_refused(tmp_path):
    """It gets another module when it is dispatched, where the hooks would be missing."""
    import nnsight

    model, tokenizer = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lazy = nnsight.TransformersModel(str(tmp_path), tokenizer=tokenizer, task="text-generation")
    assert target_of(lazy).kind == "nnsight"
    edit = Ablate(layer=1, neurons=[3])
    with pytest.raises(UnsupportedError, match="dispatch=True"), edit.on(lazy):
        pass
    lazy.dispatch()
    with edit.on(model), edit.on(lazy):
        assert_close(logits(lazy, IDS), logits(model, IDS), atol=1e-5, rtol=1e-4)


def test_the_recipe_for_remote_runs(tmp_path):
    """The block of the documentation, serialized and read back as for a server, does what the patch does."""
    page = (Path(__file__).parents[2] / "docs/interventions.md").read_text(encoding="utf-8")
    block = page.partition("<!-- remote -->\n```python\n")[2].partition("```")[0]
    model, tokenizer = tiny_model("llama")
    patch = SinkPatch(layer=1, neurons=[3, 11])
    with patch.on(model):
        want = logits(model, IDS)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(block)  # nnsight reads the source of a trace from its file
    given = {"model": nnsight_of(model, tokenizer), "patch": patch, "ids": IDS, "REMOTE": "local"}
    found = runpy.run_path(str(recipe), given, run_name="__main__")["logits"]
    assert_close(found, want, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(want, logits(model, IDS), atol=1e-3)


@pytest.mark.parametrize(("model_type", "cache"), [("gemma2", "static"), ("gpt_oss", "dynamic")])
def test_positions_beyond_a_sliding_window(model_type, cache):
    model, _ = tiny_model(model_type)
    ids = torch.cat([torch.full((2, 3), 3), torch.randint(4, 90, (2, 20))], 1)
    ids[0, 3], ids[1, 0] = 1, 1
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    site = [(1, 0, 3), (1, 1, 3), (1, 2, 3), (1, 3, 3)] if model_type == "gpt_oss" else [(1, 3)]
    edit = Ablate(sites=site, value=50.0, positions=slice(18, None))
    with edit.on(model) as run:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, cache_implementation=cache
        )
    for row, n in enumerate((20, 23)):
        assert {e.position for e in run.events if e.row == row} == set(range(18, n + 7))


def test_compiled_models_are_refused():
    model, _ = tiny_model("llama")
    edit = Ablate(layer=1, neurons=[3])
    with pytest.raises(UnsupportedError, match="compiled"), edit.on(torch.compile(model, backend="eager")):
        pass
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(UnsupportedError, match="compiled"), edit.on(model):
        pass


def test_generation_does_not_compile_while_entered():
    """With a cache of fixed size transformers would compile the decoding step, and that would skip the edit."""
    from transformers import CompileConfig

    model, _ = tiny_model("llama", num_hidden_layers=1)
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True  # as on a GPU
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    edit = Ablate(layer=0, neurons=[3], value=50.0)
    with edit.on(model):
        want = model.generate(IDS, **settings)
    model.generate(IDS, compile_config=config, **settings)  # compiled, without the edit
    assert hasattr(model, "_compiled_call")
    with edit.on(model) as run:
        got = model.generate(IDS, compile_config=config, **settings)
    assert torch.equal(got, want) and {e.position for e in run.events} == set(range(10))
