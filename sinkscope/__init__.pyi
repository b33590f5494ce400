"""The public names for type checkers; `__init__.py` imports them when they are first used."""

from . import bench as bench
from . import kv as kv
from . import loops as loops
from .app.compare import compare as compare
from .app.report import report as report
from .app.scan import scan as scan
from .app.view.command import view as view
from .conformance.check_cache import check_cache as check_cache
from .errors import SinkscopeError as SinkscopeError
from .generation.conversation import Conversation as Conversation
from .generation.generate import generate as generate
from .hooks.edit.base import Intervention as Intervention
from .hooks.edit.edits import Ablate as Ablate
from .hooks.edit.edits import Add as Add
from .hooks.edit.edits import Put as Put
from .hooks.edit.knockout import Knockout as Knockout
from .hooks.edit.sink_patch import SinkPatch as SinkPatch
from .hooks.trace import trace as trace
from .loops.barcode import barcode as barcode
from .loops.guard.guard import LoopGuard as LoopGuard
from .loops.guard.steer import Steer as Steer
from .loops.why import why_loop as why_loop
from .measure.measurement import Measurement as Measurement
from .models.checkpoints.checkpoint import list_models as list_models
from .opening.load import load as load
from .results.result import Result as Result
from .sinks.attack import attack as attack
from .sinks.mask import sink_dims as sink_dims
from .sinks.mask import sink_mask as sink_mask
from .sinks.metrics import sink_metrics as sink_metrics
from .sinks.patch import patch as patch
from .sinks.repeat import repeat as repeat
from .sinks.spikes.find import find_sinks as find_sinks
from .sinks.spikes.find import why_sink as why_sink
from .sinks.training import SinkCallback as SinkCallback
from .sparse.lines import lines as lines
from .sparse.progressive import Progressive as Progressive
from .sparse.serve import LoopServe as LoopServe
from .sparse.shapes import AShape as AShape

__version__: str

# Any other name is a measurement of another package.
def __getattr__(name: str) -> Measurement[..., Result]: ...  # pyright: ignore[reportIncompleteStub]
