"""Stand between clients and a server of models, until Ctrl-C."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sinkscope.app.loops.common import Variant, json_lines, monitor_of
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.listen import listen
from sinkscope.loops.servers.proxy import LOOPBACK, application
from sinkscope.loops.text.copies import Cut
from sinkscope.results.console import note

HOST, PORT = "127.0.0.1", 8790


@checks_arguments
def serve_proxy(
    *,
    proxy: str | None = None,
    port: Annotated[int, Field(ge=0, le=65535)] = PORT,
    host: str = HOST,
    settings: str | None = None,
    variant: Variant = "repeats",
    cut: Cut = "auto",
    json_file: str | None = None,
) -> None:
    """Pass requests on to a server, and end streamed answers that loop.

    Args:
        proxy: Stand between clients and the server at this address, and end answers that loop.
        port: With --proxy: port to listen at.
        host: With --proxy: address to listen at, by default one that other machines cannot reach.
        settings: As for `check_files`.
        variant: As for `check_files`.
        cut: As for `check_files`.
        json_file: File of lines of JSON, one for each answer that repeats itself; "-" is standard output.

    Raises:
        SinkscopeError: The address is none, or is taken.
    """
    upstream, monitor = proxy or "", monitor_of(settings, variant, cut)

    def ready(address: str) -> None:
        text = f"{address} passes on to {upstream} until Ctrl-C. It watches streamed answers only."
        if json_file == "-":
            note(text)
        else:
            print(text, flush=True)
        if host not in LOOPBACK:
            note(f"note: everyone who can reach {host} can use that server now")

    with json_lines(json_file) as told:
        listen(application(upstream, monitor, note, LOOPBACK if host in LOOPBACK else (), told), host, port, ready)
