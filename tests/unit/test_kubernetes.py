"""The manifests of `deploy/kubernetes` are valid, and name routes, settings and metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from cllm.config import EngineConfig, ServerConfig, make_config
from cllm.server.dialects.operation import operation

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE, GPU, SCALING = FOLDER / "base", FOLDER / "overlays" / "gpu", FOLDER / "components" / "autoscaling"
API = "1.33"
Manifest = dict[str, Any]


def read_manifests(text: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text))


def read_settings(folder: Path) -> dict[str, str]:
    lines = (folder / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def merge(base: Any, patch: Any) -> Any:
    """Merge as a strategic merge patch does: items of a list by their names."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and all("name" in item for item in patch):
        patches = {item["name"]: item for item in patch}
        return [merge(item, patches.get(item["name"], {})) for item in base]
    return patch


def assemble(folder: Path) -> Iterator[Manifest]:
    """What a kustomization consists of, less names and labels that are generated."""
    (kustomization,) = read_manifests((folder / "kustomization.yaml").read_text())
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += assemble(path) if path.is_dir() else read_manifests(path.read_text())
    patches = [
        read_manifests((folder / each["path"]).read_text())[0] for each in kustomization.get("patches", ())
    ]
    for manifest in found:
        for patch in patches:
            if (patch["kind"], patch["metadata"]) == (manifest["kind"], manifest["metadata"]):
                manifest = merge(manifest, patch)
        yield manifest


def find(folder: Path, kind: str) -> Manifest:
    (found,) = (manifest for manifest in assemble(folder) if manifest["kind"] == kind)
    return found


def get_pod(folder: Path = BASE) -> Manifest:
    return dict(find(folder, "StatefulSet")["spec"]["template"]["spec"])


@pytest.mark.parametrize("folder", [BASE, GPU, SCALING], ids=lambda folder: folder.name)
def test_the_manifests_match_the_schemas_of_the_api(folder: Path) -> None:
    manifests = [*assemble(folder)]
    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, API, strict=True)


def test_the_schemas_refuse_a_misspelled_field() -> None:
    wrong = merge(find(BASE, "StatefulSet"), {"spec": {"template": {"spec": {"containerz": []}}}})
    with pytest.raises(kubernetes_validate.ValidationError, match="containerz"):
        kubernetes_validate.validate(wrong, API, strict=True)


def test_kustomize_builds_the_overlay_with_the_autoscaler(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl is here")
    copy = shutil.copytree(FOLDER, tmp_path / "kubernetes") / "overlays" / "gpu"
    file = copy / "kustomization.yaml"
    file.write_text(re.sub(r"(?m)^# (components:|  - \.\./\.\./components)", r"\1", file.read_text()))
    done = subprocess.run(["kubectl", "kustomize", copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    manifests = read_manifests(done.stdout)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, API, strict=True)
    kinds = sorted(manifest["kind"] for manifest in manifests)
    assert kinds == sorted(
        ["ConfigMap", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Service", "StatefulSet"]
    )
    (settings,) = (manifest["data"] for manifest in manifests if manifest["kind"] == "ConfigMap")
    assert settings == read_settings(BASE) | read_settings(GPU)


def test_probes_ask_routes_that_exist() -> None:
    (container,) = get_pod()["containers"]
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    routes = {route.path for route in operation.routes}
    (port,) = container["ports"]
    for probe in probes.values():
        assert probe["path"] in routes and probe["port"] == port["name"]
    assert str(port["containerPort"]) == read_settings(BASE)["CLLM_PORT"]


@pytest.mark.parametrize("folder", [BASE, GPU], ids=lambda folder: folder.name)
def test_settings_are_those_of_cllm_with_values_that_it_takes(folder: Path) -> None:
    settings = {
        name.removeprefix("CLLM_").lower(): value
        for name, value in (read_settings(BASE) | read_settings(folder)).items()
    }
    assert settings.keys() <= {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    engine = make_config(EngineConfig, settings, strict=False)
    server = make_config(ServerConfig, settings, strict=False)
    found = msgspec.structs.asdict(server) | msgspec.structs.asdict(engine)
    assert {name: str(found[name]).removesuffix(".0") for name in settings if name != "host"} == {
        name: value for name, value in settings.items() if name != "host"
    }
    mounts = [mount["mountPath"] for mount in get_pod(folder)["containers"][0]["volumeMounts"]]
    for path in (server.api_keys, server.state_dir):
        assert any(path.startswith(f"{mount}/") for mount in mounts), path


def test_pods_have_time_to_drain_and_no_service_variables() -> None:
    pod = get_pod()
    (container,) = pod["containers"]
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drains = int(read_settings(BASE)["CLLM_DRAIN_S"])
    assert waits + drains + 10 <= pod["terminationGracePeriodSeconds"]
    # A Service named cllm would set CLLM_PORT, which is a setting.
    assert find(BASE, "Service")["metadata"]["name"] == "cllm" and pod["enableServiceLinks"] is False


def test_the_container_runs_as_the_user_of_the_image() -> None:
    pod = get_pod()
    (user,) = re.findall(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert pod["securityContext"]["runAsUser"] == int(user) and pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_the_gpu_overlay_asks_for_one_gpu() -> None:
    (container,) = get_pod(GPU)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["args"] == ["serve"], "the rest of the container is that of the base"


def test_the_autoscaler_reads_a_metric_of_cllm() -> None:
    scaler = find(SCALING, "HorizontalPodAutoscaler")["spec"]
    target = find(BASE, "StatefulSet")
    assert scaler["scaleTargetRef"] == {
        "apiVersion": target["apiVersion"],
        "kind": target["kind"],
        "name": target["metadata"]["name"],
    }
    (metric,) = (each["pods"]["metric"]["name"] for each in scaler["metrics"])
    assert f"| `{metric}` | gauge |" in (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert metric in (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
