"""Stand between clients and a server of models, until Ctrl-C."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sinkscope.app.loops.common import Variant, json_writer, monitor_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.listen import listen
from sinkscope.loops.servers.proxy import LOOPBACK, GoOn, application, check_upstream
from sinkscope.loops.servers.ways import ServerName, Template, found_server
from sinkscope.loops.text.copies import Cut
from sinkscope.results.console import note

HOST, PORT = "127.0.0.1", 8790


@checks_arguments
def serve_proxy(
    *,
    proxy: str | None = None,
    port: Annotated[int, Field(ge=0, le=65535)] = PORT,
    host: str = HOST,
    go_on: bool = False,
    server: ServerName = "auto",
    template: str | None = None,
    reasoning_end: str = "",
    watch_whole: bool = False,
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
        go_on: With --proxy: drop the copies of a loop and ask the server to go on behind the first, at most twice for
            an answer. A loop in a reasoning ends the reasoning. Answers with calls of tools, schemas, probabilities or
            several choices are only cut.
        server: With --go-on: which server it is, as each is asked to continue in its own way. By default found out by
            a request for its models.
        template: With --go-on: folder of the model, whose chat template makes the prompt that is continued; for a
            server that always begins a new message.
        reasoning_end: With --go-on: what ends a reasoning, such as </think>. By default as the chat template says.
        watch_whole: With --go-on: ask for answers that are not streamed as streams, so that they are watched, and give
            them to the client whole.
        settings: As for `check_files`.
        variant: As for `check_files`.
        cut: As for `check_files`.
        json_file: File of lines of JSON, one for each answer that repeats itself; "-" is standard output.

    Raises:
        SinkscopeError: The address is none, or is taken; or an option has no effect without --go-on.
    """
    upstream, monitor = proxy or "", monitor_of(settings, variant, cut)
    going = going_on(upstream, server, template, reasoning_end, watch_whole) if go_on else None
    if not go_on and (server != "auto" or template is not None or reasoning_end or watch_whole):
        raise SinkscopeError("--server, --template, --reasoning-end and --watch-whole have no effect without --go-on")

    def ready(address: str) -> None:
        watched = "all answers" if watch_whole else "streamed answers only"
        text = f"{address} passes on to {upstream} until Ctrl-C. It watches {watched}."
        if going is not None:
            text = f"{text}\n{going.server.note()}"
        if json_file == "-":
            note(text)
        else:
            print(text, flush=True)
        if host not in LOOPBACK:
            note(f"note: everyone who can reach {host} can use that server now")

    names = LOOPBACK if host in LOOPBACK else ()
    with json_writer(json_file) as told:
        listen(application(upstream, monitor, note, names, told, going), host, port, ready)


def going_on(upstream: str, server: ServerName, template: str | None, reasoning_end: str, whole: bool) -> GoOn:
    """Return how answers of a server go on; it is asked for its models if it is not named.

    Raises:
        SinkscopeError: The address is none, or the folder has no template.
    """
    check_upstream(upstream)
    read = None if template is None else Template.read(template)
    return GoOn(found_server(upstream, server, read, reasoning_end), whole)
