"""Traces of searches by OpenTelemetry: one span in the broker, one for every silo it asks, one in that node.

Off, and without cost, unless `[tracing]` or OTEL_EXPORTER_OTLP_ENDPOINT states where spans are sent. A span
has the silo, the outcome, the number of hits and the duration; never the query or the person. A node accepts
the number of a trace from its peers alone, and nothing else that comes with it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from isthmus import __version__
from isthmus.errors import MissingExtra
from isthmus.service.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

PARENT = "traceparent"
"""Header of a broker's search in a silo, as W3C defines it: trace, span, and whether it is sampled."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
END_SECONDS = 2.0
"""Seconds that a process waits at its end until its last spans are sent."""
Attributes = Mapping[str, str | int | float]
P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("isthmus.service")
_tracer: Tracer | None = None


def start_tracing(wanted: TracingSettings, role: str, name: str) -> None:
    """Send spans of this process to the place in the settings or in OpenTelemetry's own variables, if any.

    Raises MissingExtra if the settings ask for it and the extra is not installed.
    """
    global _tracer
    anywhere = wanted.endpoint or any(os.environ.get(each) for each in ENDPOINTS)
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not anywhere or off or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        if wanted.endpoint:
            raise MissingExtra("tracing", "sending traces") from error
        _log.warning("no traces are sent: pip install 'isthmus[tracing]'")
        return
    about = {"service.version": __version__, "service.instance.id": name}
    if "OTEL_SERVICE_NAME" not in os.environ:
        about["service.name"] = f"isthmus-{role}"
    sampler = ParentBasedTraceIdRatio(wanted.share) if wanted.share < 1 else None
    provider = TracerProvider(sampler=sampler, resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=wanted.endpoint or None)))
    _send_at_exit(provider)
    _tracer = provider.get_tracer("isthmus", __version__)


def _send_at_exit(provider: TracerProvider) -> None:
    """Send the last spans when the process ends; a collector that is gone does not delay the end for long."""
    ending = threading.Event()

    def send() -> None:
        ending.wait()
        provider.shutdown()

    sending = threading.Thread(target=send, name="traces", daemon=True)
    sending.start()  # now, since an exiting process cannot start threads

    @atexit.register
    def end() -> None:
        ending.set()
        sending.join(END_SECONDS)


def is_tracing() -> bool:
    """Whether spans are sent."""
    return _tracer is not None


def trace_headers() -> dict[str, str]:
    """Return the header that makes a node's span a child of the current one; {} while traces are off."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {PARENT: carrier[PARENT]} if PARENT in carrier else {}


def traced(
    name: str,
    before: Callable[..., Attributes],
    after: Callable[[T], Attributes],
    parent: Callable[..., str] = lambda *arguments, **named: "",
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Run a coroutine under a span, with attributes from its arguments (`before`) and from its result
    (`after`); `parent` returns the header `PARENT`, if there is one."""

    def decorate(work: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(work)
        async def under_span(*arguments: P.args, **named: P.kwargs) -> T:
            if _tracer is None:
                return await work(*arguments, **named)
            from opentelemetry.trace import Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            header = parent(*arguments, **named)
            with _tracer.start_as_current_span(
                name,
                context=TraceContextTextMapPropagator().extract({PARENT: header}) if header else None,
                attributes=before(*arguments, **named),
                record_exception=False,  # the text of an exception may quote what was sent
                set_status_on_exception=False,
            ) as span:
                try:
                    result = await work(*arguments, **named)
                except BaseException as error:
                    late = isinstance(error, asyncio.CancelledError)
                    span.set_attribute("isthmus.state", "late" if late else type(error).__name__)
                    span.set_status(Status(StatusCode.ERROR))
                    raise
                span.set_attributes(after(result))
                return result

        return under_span

    return decorate
