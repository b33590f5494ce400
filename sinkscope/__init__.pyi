"""The public names for type checkers; `__init__.py` imports them when they are first used."""

from sinkscope import loops as loops
from sinkscope.app.report import report as report
from sinkscope.app.scan import scan as scan
from sinkscope.app.view.notebook import view as view
from sinkscope.attention.barcode import barcode as barcode
from sinkscope.attention.lines import line_weights as line_weights
from sinkscope.errors import SinkscopeError as SinkscopeError
from sinkscope.files.result import Result as Result
from sinkscope.interventions.base import Event as Event
from sinkscope.interventions.base import Intervention as Intervention
from sinkscope.interventions.edits import Ablate as Ablate
from sinkscope.interventions.sink_patch import SinkPatch as SinkPatch
from sinkscope.interventions.steer import Add as Add
from sinkscope.kv import H2O as H2O
from sinkscope.kv import TOVA as TOVA
from sinkscope.kv import AdaKV as AdaKV
from sinkscope.kv import AShape as AShape
from sinkscope.kv import Full as Full
from sinkscope.kv import MInference as MInference
from sinkscope.kv import Observe as Observe
from sinkscope.kv import Policy as Policy
from sinkscope.kv import Progressive as Progressive
from sinkscope.kv import Pyramid as Pyramid
from sinkscope.kv import SnapKV as SnapKV
from sinkscope.kv import StreamingLLM as StreamingLLM
from sinkscope.kv import TriShape as TriShape
from sinkscope.kv.loopguard.guard import LoopGuard as LoopGuard
from sinkscope.kv.loopserve.conversation import Conversation as Conversation
from sinkscope.kv.loopserve.serve import LoopServe as LoopServe
from sinkscope.models.names import models as models
from sinkscope.models.target import Target as Target
from sinkscope.opening.load import load as load
from sinkscope.serving.generate import generate as generate
from sinkscope.sinks.attack.attack import cluster_attack as cluster_attack
from sinkscope.sinks.first_token.circuit import circuit as circuit
from sinkscope.sinks.first_token.find import find_sinks as find_sinks
from sinkscope.sinks.first_token.marking_heads import marking_heads as marking_heads
from sinkscope.sinks.patch.evaluate import evaluate_patch as evaluate_patch
from sinkscope.sinks.patch.make import make_patch as make_patch
from sinkscope.sinks.repetition.repeat import repeat as repeat
from sinkscope.trace.run import trace as trace

__version__: str
FINDER: str
