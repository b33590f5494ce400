"""`sinkscope models`."""

from sinkscope._console import emit
from sinkscope.cli.app import app
from sinkscope.cli.common import Json, check_outputs


@app.command("models")
def models_command(json: Json = None) -> None:
    """Short names of public models, and where papers found their sinks."""
    check_outputs(json)

    from sinkscope._plain import plain
    from sinkscope.models.names import models

    entries = models()
    if json is not None:
        from json import dumps

        emit(json, dumps({"schema": 1, "kind": "models", "result": plain(entries)}, indent=1) + "\n")
    if json != "-":
        from sinkscope._console import print_models

        print_models(entries)
