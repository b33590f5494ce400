"""Commands about sinks and repeated tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import sinkscope as ss
from sinkscope.app.commands.command import measures
from sinkscope.app.commands.options import Several

SINKS, REPETITION = "Sinks", "Repetition"

repeated = click.option(
    "--tokens",
    cls=Several,
    metavar="TOKEN,...",
    help="Words to repeat, one token each. By default five words of the text.",
)
spike = click.option(
    "--spike",
    type=int,
    help="Number of the spike in `find_sinks`. By default, among the spikes of the first token that need neurons, "
    "the one that most heads read.",
)
patched_repeats = click.option(
    "--max-repeats", type=int, help="Largest number of repetitions. By default 1,024, or what the context holds."
)
pieces = partial(click.option, "--pieces", type=int, help="Number of pieces of held-out text.")
piece_length = click.option("--length", type=int, default=64, help="Tokens per piece.")


@measures("find-sinks", SINKS, "sinkscope find-sinks --model llama-2-7b --json sinks.json")
@repeated
@click.option("--max-repeats", type=int, help="Number of copies of each. By default 64, or what the context holds.")
def find_sinks() -> Any:
    """Find the norm spikes of a model, the fewest neurons that make them, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. One half of the texts finds spikes and
    the neurons that they need; the other half tells what these do at the place, beside others that write as much (Sun
    et al. 2024; Yona et al. 2025, section 4).
    """
    return ss.find_sinks


@measures("circuit", SINKS, "sinkscope circuit --model llama-2-7b --html circuit.html")
@repeated
@click.option("--max-repeats", type=int, help="Largest number of copies. By default 1,024, or what the context holds.")
@click.option(
    "--only",
    type=click.Choice(["conditions", "purpose"]),
    help='Ask one of both questions alone: "conditions" (what makes the place) or "purpose" (what it is for).',
)
def circuit() -> Any:
    """Ask what makes a position the sink, and what it is for; then trace its circuit to the heads that read it.

    An ordinary position gets the place's token, sees only itself, or has its position id; each is taken away at the
    place. The place is hidden from later tokens, or they read another value from it. Then components and heads are
    replaced at the place by what they write on average at ordinary positions.
    """
    return ss.circuit


@measures("heads", SINKS, "sinkscope heads --model llama-2-7b --n-tokens 8")
@click.option(
    "--tokens",
    cls=Several,
    metavar="TOKEN,...",
    help="Words to put first, one token each. By default `n_tokens` tokens of the text, drawn by the seed.",
)
@click.option("--n-tokens", type=int, help="Number of tokens of the text to put first. By default 32.")
@spike
def heads() -> Any:
    """Find the heads that mark the first token.

    A head's output (`hook_z`, before the output projection) is replaced by its mean over ordinary positions of typical
    text. Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in
    addition to BOS itself. Heads are judged as one set over all of these tokens (Yona et al. 2025, section 4.3).
    """
    return ss.heads


@measures("patch make", SINKS, "sinkscope patch make --model llama-2-7b --out patch.json")
@spike
@patched_repeats
@click.option(
    "--limit",
    type=float,
    default=0.01,
    help="Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.",
)
@pieces(default=32)
@piece_length
@click.option("--out", metavar="FILE", required=True, help="Where the patch is written, if one is made.")
def patch_make() -> Any:
    """Make a patch and prove that it repairs repetition.

    With the neurons patched, repeated words must not reach half of the first token's projection on the spike's
    direction, text after them must give them less than half of the attention that it gives them otherwise, and the
    perplexity of held-out text must not rise; the same is measured with random neurons. The other spikes of the first
    token are read, too. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)
    """
    return ss.patch_make


@measures("patch eval", SINKS, "sinkscope patch eval --model llama-2-7b --patch patch.json")
@click.option("--patch", metavar="FILE", required=True, help="The patch.json to evaluate.")
@patched_repeats
@pieces(default=32)
@piece_length
def patch_eval() -> Any:
    """Measure what a patch repairs and costs.

    Everything is read without a patch, with it, and with a patch of as many random neurons of the same layers, which
    hold their values at the second token. Perplexity is measured on pieces of the typical text after the part that
    neutral values are taken from.
    """
    return ss.patch_eval


@measures("precision", SINKS, "sinkscope precision --model llama-2-7b --html precision.html")
@click.option(
    "--schemes",
    cls=Several,
    type=click.Choice(["a8-tensor", "a8-token", "kv8", "kv4"]),
    default=["a8-tensor,a8-token,kv8,kv4"],
    metavar="SCHEME,...",
    help="What to round: a8-tensor, a8-token (activations), kv8, kv4 (keys and values).",
)
@pieces(default=16)
@piece_length
def precision() -> Any:
    """Measure what rounding costs, and what to keep exact.

    Activations, or keys and values, are rounded as `Quantize` does it, and the next tokens of held-out text are
    compared with those of the exact model. What stays exact is compared with random ones of the same size: tokens,
    neurons of the same layers, a layer. Rounded numbers are stored as before, so no memory is saved here.
    """
    return ss.precision


@measures("repeat", REPETITION, "sinkscope repeat --model llama-2-7b --max-repeats 500")
@click.option(
    "--quantity",
    type=click.Choice(["norm", "attention", "probability"]),
    default="norm",
    help='What is read. "norm": projection of the repeated token on each spike of the first token; "attention" that '
    'copies and the sink receive; "probability" that the token comes once more.',
)
@click.option(
    "--tokens",
    cls=Several,
    metavar="A,B,...|all",
    help="Words to repeat, each one token; all is the whole vocabulary. By default five words of the text.",
)
@click.option(
    "--prefix", help="Text between BOS and the repetitions; it must not contain what is repeated. By default none."
)
@click.option("--max-repeats", type=int, help="Number of repetitions. By default 1,024, or what the context holds.")
@click.option("--sample", type=int, help="With all tokens: only this many, drawn at random.")
@click.option(
    "--resume",
    metavar="DIR",
    help="With all tokens: folder that keeps finished parts, so that an interrupted run can continue.",
)
def repeat() -> Any:
    """Measure what repeated tokens do to norm, attention or the next token.

    One causal pass per token contains every number of repetitions. A sequence is BOS, the prefix and the repetitions;
    without BOS and prefix, a word of the text that is not repeated stands first (Yona et al. 2025, Fig. 1, 2, 6
    and section 5). `patch make` and `patch eval` say what a patch changes.
    """
    return ss.repeat


@measures("attack", REPETITION, "sinkscope attack --model llama-2-7b --length 8 --sequences 100")
@click.option(
    "--tokens",
    cls=Several,
    metavar="A,B,...",
    help="Tokens to cluster and to attack with. By default `n_tokens` tokens of the vocabulary.",
)
@click.option(
    "--n-tokens",
    type=int,
    help="Tokens of the vocabulary, drawn by the seed. By default 256; a larger number than it has is all.",
)
@spike
@click.option("--length", type=int, default=8, help="Tokens per sequence.")
@click.option("--sequences", type=int, default=32, help="Sequences of each kind; 0 finds the clusters only.")
def attack() -> Any:
    """Make sinks with different tokens that one head marks.

    First, every token stands alone, and all heads of layer 0 but one are held at their mean over ordinary positions of
    typical text: a token belongs to the cluster of the head that by itself gives it the spike. Then sequences of
    different tokens of one cluster are tried without BOS, beside random tokens, and also under the patch of the neurons
    that the spike needs, if the model is in memory. Yona et al. 2025 (section 5.2, appendix B) show two
    such sequences without a success rate. All of this is about tokens that stand first, so there is no attack on a
    spike elsewhere.
    """
    return ss.attack
