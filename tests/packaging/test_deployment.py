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
from penstock.cli.app import load_commands
from penstock.settings import NAMES

KUBERNETES, SYSTEMD = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "systemd"
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
    pod = find_pod(resource)
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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/penstock/bin/penstock", "/usr/bin/env"))

    units = map(str, sorted(tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")
