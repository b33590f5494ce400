"""The public names for type checkers; `__init__.py` imports them when they are first used."""

from . import loops as loops
from .app.report import report as report
from .app.scan import scan as scan
from .app.view.notebook import view as view
from .attention.barcode import barcode as barcode
from .attention.lines import lines as lines
from .attention.why import why as why
from .conformance.check_cache import check_cache as check_cache
from .display.result import Result as Result
from .errors import SinkscopeError as SinkscopeError
from .interventions.base import Event as Event
from .interventions.base import Intervention as Intervention
from .interventions.edits import Ablate as Ablate
from .interventions.quantize import Quantize as Quantize
from .interventions.sink_patch import SinkPatch as SinkPatch
from .interventions.steer import Add as Add
from .kv import H2O as H2O
from .kv import TOVA as TOVA
from .kv import AdaKV as AdaKV
from .kv import AShape as AShape
from .kv import Full as Full
from .kv import MInference as MInference
from .kv import Observe as Observe
from .kv import Policy as Policy
from .kv import Progressive as Progressive
from .kv import Pyramid as Pyramid
from .kv import SnapKV as SnapKV
from .kv import StreamingLLM as StreamingLLM
from .kv import TriShape as TriShape
from .kv.loopguard.detect import LoopReporter as LoopReporter
from .kv.loopguard.guard import LoopGuard as LoopGuard
from .kv.loopserve.conversation import Conversation as Conversation
from .kv.loopserve.serve import LoopServe as LoopServe
from .measure.measurement import Measurement as Measurement
from .models.names import models as models
from .models.target import Target as Target
from .opening.load import load as load
from .serving.generate import generate as generate
from .sinks.attack.attack import attack as attack
from .sinks.circuit.circuit import circuit as circuit
from .sinks.first_token.find import find_sinks as find_sinks
from .sinks.marking_heads import heads as heads
from .sinks.patch.evaluate import patch_eval as patch_eval
from .sinks.patch.make import patch_make as patch_make
from .sinks.precision.precision import precision as precision
from .sinks.repetition.repeat import repeat as repeat
from .trace.run import trace as trace

__version__: str
FINDER: str

# Any other name is a measurement of another package.
def __getattr__(name: str) -> Measurement[..., Result]: ...  # pyright: ignore[reportIncompleteStub]
