"""What the world outside sees of a process: metrics and probes.

    process_metrics  events as metrics of Prometheus: what this process does
    probes           events as answers: is it alive, is it ready; for orchestrators and systemd
    listener         the small HTTP server of ``--listen``, with both

The events are those of ``penstock.observer``; nothing here asks a server.
"""
