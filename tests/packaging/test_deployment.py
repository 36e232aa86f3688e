"""What there is for Compose, Kubernetes and systemd: its commands are commands, its settings settings, and its processes are locked up."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from fixtures.documents import ROOT
from fixtures.servers import RELEASES
from penstock.cli.app import load_commands
from penstock.settings import NAMES

KUBERNETES, SYSTEMD = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "systemd"
CHART, HELM = ROOT / "deploy" / "helm", RELEASES / "helm-4.1" / "bin" / "helm"
RESOURCES = [each for path in sorted(KUBERNETES.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
PODS = [each for each in RESOURCES if each["kind"] in {"Deployment", "Job", "CronJob"}]
UNITS = sorted(SYSTEMD.iterdir())


def find_pod(resource: dict[str, Any]) -> dict[str, Any]:
    spec = resource["spec"]
    found: dict[str, Any] = (spec["jobTemplate"]["spec"] if resource["kind"] == "CronJob" else spec)["template"]["spec"]
    return found


def parse(words: list[str]) -> None:
    """Reads the arguments as the command does, without running it."""
    name, *rest = words
    with load_commands()[name].make_context(name, rest):
        pass


def commands() -> Iterator[list[str]]:
    for service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values():
        if "build" in service:
            yield service["command"]
    for resource in PODS:
        for container in find_pod(resource)["containers"]:
            yield container["args"]
    for unit in UNITS:
        for line in re.findall(r"^ExecStart=/opt/penstock/bin/penstock (.*)$", unit.read_text(), re.MULTILINE):
            yield shlex.split(line)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_a_command_that_is_deployed_is_one(words: list[str]) -> None:
    parse(words)


def test_the_settings_are_known() -> None:
    [kustomization] = [each for each in RESOURCES if each["kind"] == "Kustomization"]
    given = [each.partition("=")[0] for each in kustomization["configMapGenerator"][0]["literals"]]

    assert {name.removeprefix("PENSTOCK_").lower() for name in given} <= set(NAMES)
    assert {path.name for path in KUBERNETES.iterdir()} - set(kustomization["resources"]) == {
        "kustomization.yaml",
        "monitoring.yaml",
        "scaling.yaml",
    }


@pytest.mark.parametrize("resource", PODS, ids=lambda each: each["metadata"]["name"])
def test_a_container_may_little_and_is_asked_whether_it_lives(resource: dict[str, Any]) -> None:
    check_pod(find_pod(resource))


def check_pod(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own["allowPrivilegeEscalation"]
        assert container["resources"]["limits"]
        if container["args"][0] in {"stream", "consume", "work", "run"}:
            paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
            assert paths == ["/livez", "/livez", "/readyz"]


needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no Helm here: .ci/programs helm-4.1")


def helm(*arguments: str | Path) -> str:
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_helm
def test_the_manifests_are_what_the_chart_renders() -> None:
    """``make manifests`` writes them."""
    values = CHART / "kustomize-values.yaml"
    differing = [
        path.name
        for path in KUBERNETES.glob("*.yaml")
        if path.name != "kustomization.yaml"
        and path.read_text()
        != helm(
            *("template", "penstock", CHART / "penstock", "--values", values, "--show-only", f"templates/{path.name}")
        )
    ]

    assert differing == []


@needs_helm
def test_the_chart_is_sound_with_its_defaults_and_with_all_that_it_can(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "image": {"repository": "registry.example/rides", "tag": "7"},
                "consumers": [{"name": "ride_totals", "scaling": {"max": 4, "threshold": 100}}, {"name": "receipts"}],
                "workers": [{"name": "send_receipt", "replicas": 3}],
                "nightly": {"reconcile": ""},
                "console": {"enabled": True},
                "monitoring": {"enabled": True},
            }
        )
    )
    helm("lint", "--strict", CHART / "penstock")
    helm("lint", "--strict", CHART / "penstock", "--values", values)
    resources = list(yaml.safe_load_all(helm("template", "rides", CHART / "penstock", "--values", values)))

    by_name = {(each["kind"], each["metadata"]["name"]): each for each in resources}
    pods = [each for each in resources if each["kind"] in {"Deployment", "Job", "CronJob"}]
    assert {each["metadata"]["name"] for each in pods} == {
        *("rides-console", "rides-init-1", "rides-metrics", "rides-receipts", "rides-ride-totals"),
        *("rides-send-receipt", "rides-streamer", "rides-verify"),
    }
    for each in pods:
        check_pod(pod := find_pod(each))
        parse(pod["containers"][0]["args"])
        assert pod["containers"][0]["image"] == "registry.example/rides:7"
        assert pod["containers"][0]["envFrom"][0] == {"configMapRef": {"name": "rides"}}
    settings = by_name["ConfigMap", "rides"]["data"]
    assert {name.removeprefix("PENSTOCK_").lower() for name in settings} <= set(NAMES)
    assert "replicas" not in by_name["Deployment", "rides-ride-totals"]["spec"], "KEDA has chosen them"
    assert by_name["ScaledObject", "rides-ride-totals"]["spec"]["maxReplicaCount"] == 4
    assert by_name["Deployment", "rides-send-receipt"]["spec"]["replicas"] == 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/penstock/bin/penstock", "/usr/bin/env"))

    units = map(str, sorted(tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
