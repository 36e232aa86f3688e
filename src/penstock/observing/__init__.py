"""What the world outside sees of a pipeline and of its processes: metrics and probes.

    state_metrics    of the whole pipeline, by one exporter: what is kept in Postgres and Redis,
                     which survives restarts
    process_metrics  events as metrics of Prometheus: what this process does
    otel_metrics     the same for OpenTelemetry
    probes           events as answers: is it alive, is it ready; for orchestrators and systemd
    listener         the small HTTP server of ``--listen``, with both

The events are those of ``penstock.observer``; the exporter alone asks a server.
"""
