"""The manifests in deploy/: their options, ports, paths, variables and times are those of octavo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from octavo.cli import app
from octavo.http.listening import check_binding
from octavo.http.routes import ROUTES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
ENVIRONMENT = (ROOT / "src" / "octavo" / "config" / "environment.py").read_text(encoding="utf-8")
END_S = 20  # after --shutdown-timeout: docs/production.md#shutdown-and-deployment
MODEL_NAME = "my-checkpoint"


@dataclass
class Workload:
    """A container of octavo, with what surrounds it."""

    file: str
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    pod: dict[str, Any]
    container: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def security(self) -> dict[str, Any]:
        return self.pod.get("securityContext", {}) | self.container["securityContext"]

    @property
    def arguments(self) -> list[str]:
        return [each.replace("{{.Name}}", MODEL_NAME) for each in self.container["args"]]

    @property
    def is_engine(self) -> bool:
        return self.arguments[0] == "serve"

    @property
    def port(self) -> int:
        [port] = self.container["ports"]
        assert port["name"] == "http"
        return port["containerPort"]


@cache
def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / file).read_text(encoding="utf-8")))


def of_kind(file: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in documents(file) if each["kind"] == kind]


def workloads() -> list[Workload]:
    found = []
    for file in ("kubernetes/engines.yaml", "kubernetes/prefill_decode.yaml"):
        for each in of_kind(file, "Deployment"):
            meta, pod = each["spec"]["template"]["metadata"], each["spec"]["template"]["spec"]
            [container] = pod["containers"]
            found.append(Workload(file, each["metadata"]["name"], meta["labels"], meta["annotations"], pod, container))
    [runtime] = of_kind("kserve/runtime.yaml", "ServingRuntime")
    [service] = of_kind("kserve/runtime.yaml", "InferenceService")
    [container] = runtime["spec"]["containers"]
    pod = {"volumes": runtime["spec"]["volumes"], **service["spec"]["predictor"]}
    labels = {"serving.kserve.io/inferenceservice": service["metadata"]["name"], "component": "predictor"}  # by KServe
    found.append(Workload("kserve/runtime.yaml", "kserve", labels, runtime["spec"]["annotations"], pod, container))
    return found


WORKLOADS = workloads()
every_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=str)


def test_every_manifest_is_read() -> None:
    files = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml")}
    assert files == {each.file for each in WORKLOADS}
    assert [each.name for each in WORKLOADS] == [
        "octavo",
        "octavo-prefill",
        "octavo-decode",
        "octavo-pd-router",
        "kserve",
    ]


@every_workload
def test_command_line_accepts_arguments(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the start of the server or router, with the access check that the start begins with."""
    started = []

    def run(*arguments: Any, **_others: Any) -> None:
        config, listen = arguments[:2] if workload.arguments[0] == "route" else arguments[1:3]
        check_binding(listen.host, config, insecure=listen.insecure)
        started.append((listen.port, config))

    monkeypatch.setattr("octavo.cli.serve._run", run)
    monkeypatch.setattr("octavo.cli.route.run_router", run)
    result = CliRunner().invoke(app, workload.arguments, prog_name="octavo")
    assert result.exit_code == 0, result.output
    [(port, config)] = started
    assert port == workload.port
    if workload.is_engine:
        assert config.served_model_names == (MODEL_NAME,)
        assert config.metrics_prefix == "both"
    assert workload.pod["terminationGracePeriodSeconds"] >= pre_stop_s(workload) + config.grace_s + END_S


def pre_stop_s(workload: Workload) -> int:
    name, seconds = workload.container["lifecycle"]["preStop"]["exec"]["command"]
    assert name == "sleep"
    return int(seconds)


@every_workload
def test_probes_use_routes_that_need_no_key(workload: Workload) -> None:
    container = workload.container
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert all(container[name]["httpGet"]["port"] == "http" for name in paths)
    # The router is up before its engines are.
    start = "/ready" if workload.is_engine else "/live"
    assert paths == {"startupProbe": start, "livenessProbe": "/live", "readinessProbe": "/ready"}
    if workload.is_engine:
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 600


@every_workload
def test_prometheus_annotations_name_port_and_path(workload: Workload) -> None:
    told = {name.partition("/")[2]: value for name, value in workload.annotations.items()}
    assert told.pop("scrape", "true") == "true"
    assert told == {"port": str(workload.port), "path": "/metrics"}
    assert "/metrics" in {path for route in ROUTES for path in route.paths}


@every_workload
def test_variables_are_read_by_octavo(workload: Workload) -> None:
    for variable in workload.container.get("env", []):
        assert f'"{variable["name"]}"' in ENVIRONMENT


@every_workload
def test_container_has_no_rights_and_writes_only_to_volumes(workload: Workload) -> None:
    security, container = workload.security, workload.container
    assert security["runAsNonRoot"] is security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert re.search(r"^RUN useradd --uid (\d+) ", CONTAINERFILE, re.MULTILINE)[1] == str(security["runAsUser"])  # type: ignore[index]
    volumes = {each["name"]: each for each in workload.pod["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["name"] for each in mounts.values()} == volumes.keys()
    writable = {path for path, each in mounts.items() if "emptyDir" in volumes[each["name"]]}
    variables = {each["name"]: each.get("value") for each in container.get("env", [])}
    assert writable == {"/tmp", variables["XDG_CACHE_HOME"]} if workload.is_engine else {"/tmp"}
    if workload.file.startswith("kubernetes") and workload.is_engine:
        assert any(workload.arguments[1].startswith(f"{path}/") for path in mounts.keys() - writable)


@every_workload
def test_image_starts_octavo_and_limits_equal_requests(workload: Workload) -> None:
    assert re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE) == ['["/opt/octavo/bin/octavo"]']
    assert "command" not in workload.container
    assert workload.container["image"] == "octavo:latest"
    resources = workload.container["resources"]
    if workload.is_engine:  # the number of threads is that of the limit
        assert resources["limits"] == resources["requests"]


@every_workload
def test_labels_tell_llm_d_how_to_read_metrics(workload: Workload) -> None:
    told = {name.removeprefix("llm-d.ai/"): value for name, value in workload.labels.items() if "llm-d" in name}
    serving = {"inferenceServing": "true", "inference-serving": "true"}
    common = {"engine-type": "vllm", "model": MODEL_NAME}
    roles = {"octavo": "prefill-decode", "octavo-prefill": "prefill", "octavo-decode": "decode"}
    expected = {**common, "role": roles[workload.name]} if workload.name in roles else {}
    assert told == (expected | serving if workload.name == "octavo" else expected)
    for argument in workload.arguments:
        if argument.startswith("--role="):
            assert argument == f"--role={told['role']}"


@pytest.mark.parametrize("file", ["kubernetes/engines.yaml", "kubernetes/prefill_decode.yaml"])
def test_selectors_find_pods(file: str) -> None:
    pods = [each for each in WORKLOADS if each.file == file]
    for each in of_kind(file, "Deployment"):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        assert [pod.name for pod in pods if wanted <= pod.labels.items()] == [each["metadata"]["name"]]
        assert each["metadata"]["labels"] == each["spec"]["template"]["metadata"]["labels"]
    covered: set[str] = set()
    for service in of_kind(file, "Service"):
        chosen = [pod for pod in pods if service["spec"]["selector"].items() <= pod.labels.items()]
        assert chosen
        assert all(port["targetPort"] == "http" for port in service["spec"]["ports"])
        covered |= {pod.name for pod in chosen}
    assert covered == {pod.name for pod in pods}


@every_workload
def test_network_policy_guards_pods_without_keys(workload: Workload) -> None:
    assert "--insecure" in workload.arguments
    policies = [each["spec"] for each in of_kind(workload.file, "NetworkPolicy")]
    [policy] = [each for each in policies if each["podSelector"]["matchLabels"].items() <= workload.labels.items()]
    assert policy["policyTypes"] == ["Ingress"]
    for rule in policy["ingress"]:
        assert all(each.keys() <= {"podSelector", "namespaceSelector"} for each in rule["from"])
        for each in rule["from"]:  # an empty selector of namespaces would admit the whole cluster
            assert each.get("namespaceSelector", {"matchLabels": "any"})["matchLabels"]
        assert all(port["port"] == "http" for port in rule.get("ports", []))


def test_router_finds_both_engines_by_name_of_headless_service() -> None:
    file = "kubernetes/prefill_decode.yaml"
    [router] = [each for each in WORKLOADS if each.arguments[0] == "route"]
    [argument] = [each for each in router.arguments if each.startswith("--engines-dns=")]
    name, _, port = argument.partition("=")[2].partition(":")
    [service] = [each for each in of_kind(file, "Service") if each["metadata"]["name"] == name]
    assert service["spec"]["clusterIP"] == "None"
    chosen = [each for each in WORKLOADS if service["spec"]["selector"].items() <= each.labels.items()]
    assert [each.name for each in chosen] == ["octavo-prefill", "octavo-decode"]
    assert {each.port for each in chosen} == {int(port)}
    assert all("--kv-direct" in each.arguments for each in chosen)


def test_inference_service_uses_runtime() -> None:
    [runtime] = of_kind("kserve/runtime.yaml", "ServingRuntime")
    [service] = of_kind("kserve/runtime.yaml", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert service["metadata"]["name"] == MODEL_NAME
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container"
