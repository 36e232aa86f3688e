"""Makes spans around a consumer's handler, if the process has given OpenTelemetry a provider.

Otherwise nothing happens here.

    trace="link"     a span for each call of the transaction's handler, linked to the spans that
                     staged its records
    trace="child"    a span for each record or job, a child of the one that staged it

The span is current while the handler runs, so that its statements and what it stages go on in the
trace.  Each attempt has a span of its own: one that failed has the status ERROR and the class of
the error, never its text, which may quote a payload.  What a handler raises to say something, such
as ``Snooze``, is an event.

That OpenTelemetry is imported says nothing: redis-py does it where the package is installed.  A
span that cannot be made is logged, once, and left out: no handler fails for it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from penstock.batches.record_batch import Records
from penstock.consuming.failures import Culprit, Repeated
from penstock.database.driver_errors import driver_error
from penstock.declaring.declarations import ConsumerSpec
from penstock.declaring.outcomes import DeadLetter, HandlerOutcome, Job
from penstock.display import find_release
from penstock.parsing import parse_json
from penstock.records import Record
from penstock.staging.trace_headers import OPENTELEMETRY, TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

MAX_LINKS = 8
"""Most records whose headers are read for a span: each link costs as much as the delivery of two
records."""

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
CHANNEL = "messaging.destination.name"
CONSUMER = "messaging.consumer.group.name"
SHARD = "messaging.destination.partition.id"
COUNT, RECORD, ERROR = "messaging.batch.message_count", "messaging.message.id", "error.type"
ATTEMPT = "penstock.attempt"
"""Names of the attributes, by the messaging conventions of OpenTelemetry, which are in
development."""

log = structlog.get_logger("penstock.consumer")

_NOTHING = nullcontext()

_noted: ContextVar["NotedTrace | None"] = ContextVar("penstock_trace", default=None)
"""Where the trace of a handler's span is noted: see ``note_trace``."""

_W3C = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
"""A ``traceparent``: a later version may have more at its end."""


class HandlerSpans:
    """Spans of one consumer's handler."""

    def __init__(self, consumer: ConsumerSpec) -> None:
        self.has_children = consumer.trace == "child"
        self._name = f"process {consumer.channel.name}"
        self._common = {
            SYSTEM: "penstock",
            OPERATION: "process",
            OPERATION_TYPE: "process",
            CHANNEL: consumer.channel.name,
            CONSUMER: consumer.name,
        }
        self._tracer: Tracer | None = None
        self._has_failed = False

    def around_call(self, items: Any) -> AbstractContextManager[None]:
        """Returns the span around a transaction's handler, if there is one for all its items.

        A DataFrame has no links.
        """
        if self.has_children or not _is_traced():
            return _NOTHING
        return self._open(items if isinstance(items, Sequence) else (), is_child=False)

    def around_item(self, item: Any) -> AbstractContextManager[None]:
        """Returns the span around one item, if each has its own."""
        if not self.has_children or not _is_traced():
            return _NOTHING
        return self._open([item], is_child=True)

    @contextmanager
    def _open(self, items: Sequence[Any], *, is_child: bool) -> Iterator[None]:
        with ExitStack() as stack:
            span = None
            try:
                span = stack.enter_context(self._begin(items, is_child=is_child))
                _note_trace(span.get_span_context())
            except Exception as error:  # noqa: BLE001  the application's provider must not fail its handlers
                if not self._has_failed:
                    self._has_failed = True
                    log.warning(
                        "span not made", consumer=self._common[CONSUMER], error=type(error).__name__
                    )
            try:
                yield
            except BaseException as error:
                if span is not None:
                    _note_error(
                        span, error.__cause__ or error if isinstance(error, Culprit) else error
                    )
                raise

    def _begin(self, items: Sequence[Any], *, is_child: bool) -> "AbstractContextManager[Span]":
        from opentelemetry import trace  # noqa: PLC0415  the process has it
        from opentelemetry.context import Context  # noqa: PLC0415  the same

        if self._tracer is None:
            self._tracer = trace.get_tracer("penstock", find_release())
        contexts = _read_contexts(items)
        # Never a child of a span that happens to be current: a web process may work on records in
        # the middle of a request.
        parent = (
            trace.NonRecordingSpan(contexts[0]) if is_child and contexts else trace.INVALID_SPAN
        )
        return self._tracer.start_as_current_span(
            self._name,
            trace.set_span_in_context(parent, Context()),
            trace.SpanKind.CONSUMER,
            self._describe(items),
            () if is_child else [trace.Link(context) for context in contexts],
            record_exception=False,
            set_status_on_exception=False,
        )

    def _describe(self, items: Sequence[Any]) -> Mapping[str, str | int]:
        if len(items) != 1:
            return {**self._common, COUNT: len(items)} if items else self._common
        [item] = items
        if not isinstance(item, Record | Job):  # a member of an Ick
            return self._common
        attributes: dict[str, str | int] = {RECORD: str(item.id), SHARD: str(item.shard)}
        if isinstance(item, Job):
            attributes[ATTEMPT] = item.attempts
        return {**self._common, **attributes}


def _is_traced() -> bool:
    """Returns whether the process has given OpenTelemetry a provider of spans."""
    trace = sys.modules.get(OPENTELEMETRY)
    # missing while another thread imports the module
    find_provider = getattr(trace, "get_tracer_provider", None)
    return find_provider is not None and not isinstance(find_provider(), trace.ProxyTracerProvider)  # type: ignore[union-attr]


@dataclass(slots=True)
class NotedTrace:
    """Trace id of the last recorded span of a handler; None if none is recorded."""

    id: str | None = None


def note_trace() -> NotedTrace:
    """Has the trace noted of handlers called from now on in this context, its copies and tasks."""
    trace = NotedTrace()
    _noted.set(trace)
    return trace


def _note_trace(context: "SpanContext") -> None:
    if context.trace_flags.sampled and (trace := _noted.get()) is not None:
        trace.id = f"{context.trace_id:032x}"


def _note_error(span: "Span", error: BaseException) -> None:
    """Notes what ended a handler: a failure, or an outcome that it asked for."""
    from opentelemetry.trace import StatusCode  # noqa: PLC0415  the process has it

    kind = type(driver_error(error)).__name__
    if isinstance(error, HandlerOutcome | Repeated) and not isinstance(error, DeadLetter):
        span.add_event(kind)
        return
    span.set_attribute(ERROR, kind)
    span.set_status(StatusCode.ERROR)


def _read_contexts(items: Sequence[Any]) -> "list[SpanContext]":
    """Returns the spans that staged the first items whose headers name one, each once."""
    if isinstance(items, Records):
        headers = items.headers_json  # without making the records
    else:
        headers = [item.headers_json for item in items if isinstance(item, Record | Job)]
    contexts: dict[tuple[int, int], SpanContext] = {}
    texts: set[str] = set()
    for text in headers:
        if TRACEPARENT not in text or text in texts:
            continue
        texts.add(text)
        with suppress(ValueError):  # the handler will see the same, if it reads them
            context = _read_context(parse_json(text))
            if context is not None:
                contexts[context.trace_id, context.span_id] = context
        if len(texts) == MAX_LINKS:
            break
    return list(contexts.values())


def _read_context(headers: object) -> "SpanContext | None":
    """Returns the span that headers name; None if they are not as W3C wants them.

    OpenTelemetry's own parser takes ten times as long.
    """
    trace = sys.modules[OPENTELEMETRY]
    fields = headers if isinstance(headers, dict) else {}
    traceparent, tracestate = fields.get(TRACEPARENT), fields.get(TRACESTATE)
    match = _W3C.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    state = trace.TraceState.from_header([tracestate]) if isinstance(tracestate, str) else None
    context: SpanContext = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags), trace_state=state
    )
    return context if context.is_valid else None
