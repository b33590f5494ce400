"""What a proxy tells whoever runs it: /metrics counts by model, in the text form of Prometheus, and /health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

HEALTH_WAIT = 5  # seconds for the server to say something
MOST_MODELS = 100  # whoever can ask can invent names, and each name is kept


class Counts:
    """Counts answers, alarms, cuts and the tokens that cuts saved, by model. It needs prometheus-client.

    Attributes:
        unwatched: Counter of what was passed on unwatched, by reason.
        broken: Counter of answers in which the server broke off, by model.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"sinkscope_{name}", text, labels, registry=self._registry)

        self._registry = CollectorRegistry()
        self._models = set[str]()
        self._answers = counter("answers", "Answers that were watched.", "model")
        self._alarms = counter("alarms", "Answers with a repetition, at most one of each answer.", "model", "verdict")
        self._cuts = counter("cuts", "Answers that were ended because they loop.", "model")
        saved = "Tokens up to their requests' limits that cut answers left unwritten."
        self._saved = counter("saved_tokens", saved, "model")
        self._continued = counter("continued", "Loops that were dropped, and whose answers go on.", "model")
        self._closed = counter("closed_reasonings", "Loops in a reasoning that was closed.", "model")
        self._dropped = counter("dropped_tokens", "Tokens of copies that no client got.", "model")
        self._seconds = counter("continuation_seconds", "Seconds until continuations began.", "model")
        self.unwatched = counter("unwatched", "Answers, or lines of some, that were passed on unwatched.", "reason")
        self.broken = counter("broken_answers", "Answers in which the server broke off.", "model")

    def answer(self, model: str, verdict: str = "", cut: bool = False, saved: int | None = None) -> None:
        """Count an answer that has ended.

        Args:
            model: Name of the model; from the 101st name on, they count as "other".
            verdict: "loops" or "suspicious"; empty if it does not repeat itself.
            cut: Whether the proxy ended it.
            saved: Number of tokens that it could have gone on; None if the request has no limit.
        """
        name = self.name_of(model)
        self._answers.labels(name).inc()
        self._cuts.labels(name).inc(cut)
        self._saved.labels(name).inc(saved or 0)
        for kind in ("loops", "suspicious"):
            self._alarms.labels(name, kind).inc(kind == verdict)

    def going_on(self, model: str, closed: bool, dropped: int, seconds: float) -> None:
        """Count a loop that was dropped.

        Args:
            model: Name of the model.
            closed: Whether it was in a reasoning, which was closed.
            dropped: Number of tokens that the client did not get.
            seconds: Time until the continuation began.
        """
        name = self.name_of(model)
        self._continued.labels(name).inc()
        self._closed.labels(name).inc(closed)
        self._dropped.labels(name).inc(dropped)
        self._seconds.labels(name).inc(seconds)

    def name_of(self, model: str) -> str:
        """Return the name under which a model is counted."""
        name = model or "unknown"
        if name not in self._models and len(self._models) >= MOST_MODELS:
            name = "other"
        self._models.add(name)
        return name

    def text(self) -> tuple[bytes, str]:
        """Return the counts as text, and its type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def own_pages(client: httpx.AsyncClient, server: httpx.URL, counts: Counts) -> list[Route]:
    """Return the routes.

    Args:
        client: Asks the server.
        server: Its address.
        counts: What the proxy has counted.
    """
    import httpx
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def metrics(request: Request) -> Response:
        text, kind = counts.text()
        return Response(text, headers={"content-type": kind})

    async def health(request: Request) -> Response:
        try:
            url = server.copy_with(raw_path=server.raw_path.rstrip(b"/") + b"/health")
            status = (await client.get(url, timeout=HEALTH_WAIT)).status_code
        except httpx.HTTPError as error:
            return JSONResponse({"status": "the server does not answer", "problem": type(error).__name__}, 503)
        if status >= 500:  # it is loading its model, say
            return JSONResponse({"status": "the server is not ready", "server": status}, 503)
        return JSONResponse({"status": "ok", "server": status})  # not every server has this path

    return [Route("/metrics", metrics), Route("/health", health)]
