"""The alerts and the dashboard name metrics that are exported and commands that exist, and Prometheus takes all of it."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures.documents import ROOT
from penstock.cli.app import load_commands
from penstock.observing import process_metrics, state_metrics

DEPLOY = ROOT / "deploy"
ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text()
TESTS = sorted((DEPLOY / "prometheus").glob("*_test.yml"))
ALERTS_TEST = "".join(path.read_text() for path in TESTS)
PROMTOOL = shutil.which("promtool")

METRICS = {name: metric.labels for name, metric in state_metrics.METRICS.items()} | {
    f"{name}{series}": (*metric.labels, *labels)
    for name, metric in process_metrics.METRICS.items()
    for series, labels in (
        (("_bucket", ("le",)), ("_sum", ()), ("_count", ())) if metric.kind == "histogram" else (("", ()),)
    )
}
"""The labels of all series that are exported, beside the schema."""

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="apt-get install prometheus")


def promtool(
    *arguments: str, given: str = "", directory: Path = DEPLOY / "prometheus"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROMTOOL), *arguments], input=given, cwd=directory, capture_output=True, text=True, check=False
    )


def test_all_names_are_exported() -> None:
    dashboard = (DEPLOY / "grafana" / "dashboard.json").read_text()

    for text in (ALERTS, dashboard):
        used = set(re.findall(r"penstock_[a-z_]+", text))
        assert used - {"penstock_"} <= METRICS.keys()
        for name, labels in re.findall(r"(penstock_[a-z_]+)\{([^}]*)\}", text):
            known = {"schema", *METRICS[name]}
            assert set(re.findall(r"(\w+)(?==|!~|=~)", labels.replace("\\", ""))) <= known, (name, labels)


def test_every_alert_says_what_to_type() -> None:
    commands = load_commands()
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    runs = re.findall(r'summary: ".+", run: "penstock ([a-z-]+)[^"]*"', ALERTS)

    assert len(alerts) == len(set(alerts)) == len(runs)
    assert set(runs) <= commands.keys()


def test_the_dashboard_is_the_one_that_the_script_writes() -> None:
    """If this fails, run ``python deploy/grafana/dashboard.py``."""
    made = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))["make_dashboard"]()

    assert json.loads((DEPLOY / "grafana" / "dashboard.json").read_text()) == made


@needs_promtool
def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    values = {"$__rate_interval": "5m", "$schema": "penstock", "$channel": ".*"}
    rules: list[dict[str, str]] = []
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        expression = target["expr"]
        for name, value in values.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"panel:{len(rules)}", "expr": expression})
        assert target["exemplar"] == ("_bucket" in expression)
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))

    checked = promtool("check", "rules", "rules.yml", directory=tmp_path)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(rules) > 25


def test_every_alert_is_seen_to_fire_and_to_end() -> None:
    tried = re.findall(r"alertname: (\w+)(\})?(?:\n +(exp_alerts))?", ALERTS_TEST)
    alerts = set(re.findall(r"- alert: (\w+)", ALERTS))

    assert {name for name, _, fires in tried if fires} == alerts
    assert {name for name, ends, _ in tried if ends} == alerts
    assert f"has {len(alerts)} alerting rules" in (ROOT / "docs" / "how-to" / "watch-with-prometheus.md").read_text()


@pytest.mark.slow
@needs_promtool
def test_the_alerts_are_rules_that_fire_and_stay_silent_as_they_should() -> None:
    checked, tested = (
        promtool("check", "rules", "alerts.yml"),
        promtool("test", "rules", *(path.name for path in TESTS)),
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert tested.returncode == 0, tested.stdout + tested.stderr
