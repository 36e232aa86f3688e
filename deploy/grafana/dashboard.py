"""Writes dashboard.json, a dashboard for Grafana, from the table below; a test compares both with the metrics that are exported.

python deploy/grafana/dashboard.py
"""

import json
from pathlib import Path
from typing import Any

OF = '{schema="$schema",channel=~"$channel"}'
SCHEMA = '{schema="$schema"}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

ROW = 24


def _quantile(percent: int, name: str) -> str:
    """A quantile of a histogram of all processes, those of workers with --listen."""
    return f"histogram_quantile(0.{percent}, sum by (le) (rate(penstock_{name}_bucket{OF}[$__rate_interval])))"


# title, unit, width, (expression, legend) each
PANELS: list[tuple[str, str, int, list[tuple[str, str]]]] = [
    (
        "Records a second",
        "ops",
        12,
        [
            (f"sum(rate(penstock_sequenced_records_total{OF}[$__rate_interval]))", "sequenced"),
            (f"sum(rate(penstock_published_records_total{OF}[$__rate_interval]))", "published"),
            (
                f"sum by (consumer) (rate(penstock_consumer_applied_records_total{OF}[$__rate_interval]))",
                "applied by {{consumer}}",
            ),
        ],
    ),
    (
        "Waiting",
        "short",
        12,
        [
            (f"sum(penstock_staged_records{OF})", "staged, no offset"),
            (f"sum(penstock_unpublished_records{OF})", "sequenced, not published"),
        ],
    ),
    (
        "Lag in records",
        "short",
        12,
        [(f"sum by (consumer, channel) (penstock_consumer_lag_records{OF})", "{{consumer}} {{channel}}")],
    ),
    (
        "Lag in seconds",
        "s",
        12,
        [(f"max by (consumer, channel) (penstock_consumer_lag_seconds{OF})", "{{consumer}} {{channel}}")],
    ),
    ("From staging to COMMIT", "s", 12, [(_quantile(n, "stage_to_commit_seconds"), f"p{n}") for n in (50, 95, 99)]),
    ("A handler's call", "s", 12, [(_quantile(n, "handler_duration_seconds"), f"p{n}") for n in (50, 95, 99)]),
    (
        "Calls of handlers a second, by error",
        "ops",
        12,
        [
            (
                f"sum by (consumer, error_type) (rate(penstock_handler_duration_seconds_count{OF}[$__rate_interval]))",
                "{{consumer}} {{error_type}}",
            )
        ],
    ),
    (
        "Records a second, by what became of them",
        "ops",
        12,
        [
            (
                f"sum by (consumer, outcome) (rate(penstock_delivered_records_total{OF}[$__rate_interval]))",
                "{{consumer}} {{outcome}}",
            )
        ],
    ),
    (
        "Halted, stopped, isolated, unread",
        "short",
        8,
        [
            (f"sum(penstock_consumer_halted{SCHEMA})", "halted shards of consumers"),
            (f"sum(penstock_shard_stopped{SCHEMA})", "stopped shards"),
            (f"sum(penstock_isolated_records{SCHEMA})", "isolated records"),
            (f"sum(penstock_unread_records{SCHEMA})", "unread records"),
            (f"sum(penstock_consumer_paused{SCHEMA})", "paused consumers"),
        ],
    ),
    ("Dead letters", "short", 8, [(f"sum by (consumer) (penstock_consumer_dead_letters{SCHEMA})", "{{consumer}}")]),
    ("Oldest transaction", "s", 8, [(f"penstock_oldest_transaction_age_seconds{SCHEMA}", "age")]),
    ("Queues", "short", 8, [(f"sum by (channel, state) (penstock_queue_messages{OF})", "{{channel}} {{state}}")]),
    (
        "Waiting for a worker, p99",
        "s",
        8,
        [
            (
                'max by (channel, tenants) (penstock_queue_dwell_seconds{schema="$schema",channel=~"$channel",percentile="99"})',
                "{{channel}}, {{tenants}} tenants",
            )
        ],
    ),
    ("Icks", "short", 8, [(f"sum by (channel, state) (penstock_ick_members{OF})", "{{channel}} {{state}}")]),
    (
        "Memory of logs in Redis",
        "bytes",
        12,
        [
            (f"sum by (channel) (penstock_log_memory_bytes{OF})", "{{channel}}"),
            (f"sum by (channel) (penstock_log_memory_limit_bytes{OF})", "budget of {{channel}}"),
        ],
    ),
    (
        "Differences at the last reconciliation",
        "short",
        12,
        [(f"penstock_reconciliation_differences{SCHEMA}", "{{reconciliation}}")],
    ),
]


def make_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels, x, y = [], 0, 0
    for number, (title, unit, width, targets) in enumerate(PANELS, 1):
        if x + width > ROW:
            x, y = 0, y + 8
        panels.append(
            {
                "id": number,
                "title": title,
                "type": "timeseries",
                "datasource": SOURCE,
                "gridPos": {"x": x, "y": y, "w": width, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {
                        "refId": chr(65 + index),
                        "expr": expression,
                        "legendFormat": legend,
                        "exemplar": "_bucket" in expression,
                    }
                    for index, (expression, legend) in enumerate(targets)
                ],
            }
        )
        x += width
    return {
        "title": "Penstock",
        "uid": "penstock",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _make_variable("schema", "label_values(penstock_up, schema)", is_many=False),
                _make_variable(
                    "channel", f"label_values(penstock_sequenced_records_total{SCHEMA}, channel)", is_many=True
                ),
            ]
        },
        "panels": panels,
    }


def _make_variable(name: str, query: str, *, is_many: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "v"},
        "refresh": 2,
        "multi": is_many,
        "includeAll": is_many,
        "allValue": ".*" if is_many else None,
    }


def main() -> None:
    """Writes the dashboard beside this file."""
    text = json.dumps(make_dashboard(), indent=1) + "\n"
    Path(__file__).with_name("dashboard.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
