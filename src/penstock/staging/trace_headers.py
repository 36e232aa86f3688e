"""The headers by which a trace goes on.

W3C's ``traceparent`` and ``tracestate``, written when a record is staged.

Nothing is imported.  A process that makes spans has imported ``opentelemetry.trace``; in any other,
a record costs a look-up in ``sys.modules`` more.  They are taken at the call or the flush that
stages, while the span of the request is current: the streamer that publishes the record later has
another.

    application's own headers       stay as they are, ``traceparent`` among them
    a span that is not recorded     writes nothing: its trace was left out by the sampler
    an Ick                          keeps no headers
    headers that are full           are staged without: a trace never makes a record fail

A trigger has no span.  It writes the traceparent that the transaction has been given, if any:

    SELECT set_config('penstock.traceparent', '00-…-…-01', true)
"""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

MAX_TRACE_BYTES = 1024
"""Most bytes that the two headers take.

A longer ``tracestate`` is left out, which W3C allows from 512 characters on.
"""

OPENTELEMETRY = "opentelemetry.trace"
"""Name of the module that an application which traces has imported."""

TRIGGERS_TRACE = (
    "'traceparent', nullif(left(current_setting('penstock.traceparent', true), 55), '')"
)
"""Arguments of ``jsonb_build_object``.

The header that a trigger adds, NULL if the transaction has no trace.
"""


def with_trace(headers: str | None, own_headers: object, limit: int) -> str | None:
    """Adds the current trace to the headers of a record.

    Args:
        headers: The application's headers as JSON text.
        own_headers: The application's headers as a dict.
        limit: Most bytes that the headers may take.
    """
    module = sys.modules.get(OPENTELEMETRY)
    if module is None or (isinstance(own_headers, Mapping) and TRACEPARENT in own_headers):
        return headers
    # missing while another thread imports the module
    find_span = getattr(module, "get_current_span", None)
    trace = _encode(find_span()) if find_span is not None else None
    if trace is None or headers in {None, "{}"}:
        return trace or headers
    assert headers is not None
    joined = f"{headers[:-1]},{trace[1:]}"
    return joined if len(joined.encode()) <= limit else headers


def _encode(span: "Span") -> str | None:
    """Encodes the headers of a span as JSON text; None if it is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    ids = f"{context.trace_id:032x}-{context.span_id:016x}"
    values: dict[str, Any] = {TRACEPARENT: f"00-{ids}-{context.trace_flags & 1:02x}"}
    text = json.dumps(values)
    if not context.trace_state:
        return text
    longer = json.dumps({**values, TRACESTATE: context.trace_state.to_header()})
    return longer if len(longer) <= MAX_TRACE_BYTES else text
