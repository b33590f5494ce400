"""The public names for type checkers; `__init__.py` imports them when they are first used."""

from sinkscope import loops as loops
from sinkscope.attention.barcode import barcode as barcode
from sinkscope.attention.ditto import ditto as ditto
from sinkscope.attention.lines import line_weights as line_weights
from sinkscope.attention.locking import locking as locking
from sinkscope.attention.overlap import line_overlap as line_overlap
from sinkscope.attention.rotary import rotary_invariance as rotary_invariance
from sinkscope.bench.commands import needle as needle
from sinkscope.errors import SinkscopeError as SinkscopeError
from sinkscope.generate import generate as generate
from sinkscope.interventions.base import Event as Event
from sinkscope.interventions.base import Intervention as Intervention
from sinkscope.interventions.edits import Ablate as Ablate
from sinkscope.interventions.edits import Write as Write
from sinkscope.interventions.sink_detector import SinkDetector as SinkDetector
from sinkscope.interventions.sink_patch import SinkPatch as SinkPatch
from sinkscope.kv.loopguard.guard import LoopGuard as LoopGuard
from sinkscope.kv.loopserve.conversation import Conversation as Conversation
from sinkscope.kv.loopserve.serve import LoopServe as LoopServe
from sinkscope.models.load import load as load
from sinkscope.models.names import models as models
from sinkscope.models.target import Target as Target
from sinkscope.report import report as report
from sinkscope.results import Result as Result
from sinkscope.sinks.attack.attack import cluster_attack as cluster_attack
from sinkscope.sinks.attack.clusters import token_clusters as token_clusters
from sinkscope.sinks.attack.detect import detect_attack as detect_attack
from sinkscope.sinks.first_token.circuit import circuit as circuit
from sinkscope.sinks.first_token.find import find_sinks as find_sinks
from sinkscope.sinks.first_token.marking_heads import marking_heads as marking_heads
from sinkscope.sinks.first_token.massive import massive_activations as massive_activations
from sinkscope.sinks.first_token.positions import token_positions as token_positions
from sinkscope.sinks.first_token.screen import neuron_screen as neuron_screen
from sinkscope.sinks.first_token.separate import separability as separability
from sinkscope.sinks.first_token.training import sinks_over_training as sinks_over_training
from sinkscope.sinks.patch.evaluate import evaluate_patch as evaluate_patch
from sinkscope.sinks.patch.make import make_patch as make_patch
from sinkscope.sinks.repetition.atlas import sink_atlas as sink_atlas
from sinkscope.sinks.repetition.converge import convergence as convergence
from sinkscope.sinks.repetition.divergence import divergence as divergence
from sinkscope.sinks.repetition.repeat import repeat_norms as repeat_norms
from sinkscope.sinks.repetition.repeat_attention import repeat_attention as repeat_attention
from sinkscope.trace.run import trace as trace

__version__: str
