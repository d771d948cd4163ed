"""What `deploy/` starts holds together: every file, port, data source and metric in it exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from cirron_otel import semconv
from cirron_otel.otlp.instruments import INSTRUMENTS
from delivery.test_collector_config import KNOWN, values

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

#: Ports that the images listen on beside those their configuration names.
IMAGE_PORTS = {"jaeger": {4317, 16686}, "prometheus": {9090}, "grafana": {3000}}


def load(name: str) -> Any:
    """A file of ours, as YAML or JSON."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def prometheus_names() -> dict[str, set[str]]:
    """Every series of ours as Prometheus names it, with the labels that its points may have."""
    units = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "": ""}
    promoted = load("prometheus.yaml")["otlp"]["promote_resource_attributes"]
    common = {one.replace(".", "_") for one in promoted} | {"job", "instance"}
    out: dict[str, set[str]] = {}
    for one in INSTRUMENTS.values():
        unit = "" if one.unit.startswith("{") else units[one.unit]
        name = one.name.replace(".", "_")
        name += "" if not unit or name.endswith(unit) else unit
        labels = common | {key.replace(".", "_") for key in one.keys}
        if one.kind == "histogram":
            out |= {f"{name}_sum": labels, f"{name}_count": labels}
            out[f"{name}_bucket"] = labels | {"le"}
        else:
            out[name + "_total" * (one.kind == "sum")] = labels
    return out


def check_expression(expression: str, variables: set[str]) -> None:
    """Every metric, label and variable in a PromQL expression is one there is."""
    names = prometheus_names()
    used = set(re.findall(r"\bcirron_\w+(?=[{\[ )]|$|,)", re.sub(r'"[^"]*"', '""', expression)))
    metrics = {name for name in used if name in names}
    labels = set.union(*(names[name] for name in metrics)) if metrics else set()
    assert metrics, expression
    assert used - metrics <= labels, expression
    for inside in re.findall(r"\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', inside)):
            assert label in labels, (label, expression)
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {one.strip() for one in grouped.split(",")} <= labels, expression
    for name in re.findall(r"\$(\w+)", expression):
        assert name in variables | {"__rate_interval", "__tags"}, expression


# --- compose --------------------------------------------------------------------------------------


def ports_of(service: str) -> set[int]:
    """What a service listens on inside."""
    found = set(IMAGE_PORTS.get(service, ()))
    if service in {"collector", "tempo"}:
        config = load(f"{service}.yaml")
        found |= {int(one.rpartition(":")[2]) for one in values(config, "endpoint")
                  if one.startswith("0.0.0.0:")}  # fmt: skip
        found |= set(values(config, "http_listen_port"))
    return found


def test_compose_holds_together() -> None:
    """Images are pinned, mounted files exist, volumes are declared, ports are listened on."""
    compose = load("compose.yaml")
    services = compose["services"]
    assert set(services) == {"collector", "tempo", "jaeger", "prometheus", "grafana"}
    named = set()
    mounted = {}
    for name, service in services.items():
        image, _, tag = service["image"].rpartition(":")
        assert "/" in image
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
                assert mode == ["ro"]
                mounted[name, target] = DEPLOY / source
            else:
                named.add(source)
        for port in service.get("ports", ()):
            address, outside, inside = port.split(":")
            assert address == "127.0.0.1"
            assert outside == inside
            assert int(inside) in ports_of(name)
    assert named == set(compose["volumes"])
    for name, service in services.items():
        for word in service.get("command", ()):
            if match := re.match(r"--?config(?:\.file)?=(.*)", word):
                assert (name, match[1]) in mounted
    (rules,) = load("prometheus.yaml")["rule_files"]
    assert mounted["prometheus", rules] == DEPLOY / "prometheus-rules.yaml"
    (provider,) = load("grafana/provisioning/dashboards/cirron.yaml")["providers"]
    assert mounted["grafana", provider["options"]["path"]] == DEPLOY / "grafana/dashboards"
    assert mounted["grafana", "/etc/grafana/provisioning"].is_dir()
    storage = load("tempo.yaml")["storage"]["trace"]
    for path in (storage["wal"]["path"], storage["local"]["path"]):
        assert path.startswith("/var/tempo/")
    assert "tempo:/var/tempo" in services["tempo"]["volumes"]


def test_the_collector_reaches_every_backend() -> None:
    """Its pipelines name what is defined; its exporters lead to services and ports there are."""
    config, services = load("collector.yaml"), load("compose.yaml")["services"]
    used: dict[str, set[str]] = {kind: set() for kind in KNOWN}
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            used[kind].update(names)
    assert set(config["service"]["pipelines"]) == {"traces", "metrics", "logs"}
    for kind, known in KNOWN.items():
        assert used[kind] == set(config.get(kind, {}))
        assert {one.partition("/")[0] for one in used[kind]} <= known
    for name, exporter in config["exporters"].items():
        if "endpoint" not in exporter:
            assert name.startswith("debug/")
            continue
        url = exporter["endpoint"]
        parts = urlsplit(url if "://" in url else f"//{url}")
        assert parts.hostname in services
        assert parts.port in ports_of(str(parts.hostname))
        assert exporter["retry_on_failure"]["max_elapsed_time"] == 0
    assert "--web.enable-otlp-receiver" in services["prometheus"]["command"]
    assert config["exporters"]["otlp_http/prometheus"]["endpoint"].endswith("/api/v1/otlp")


def test_promoted_labels_are_attributes_of_ours() -> None:
    """What Prometheus makes labels of stands on every resource we write."""
    ours = {value for key, value in vars(semconv).items() if key.isupper()}
    assert set(load("prometheus.yaml")["otlp"]["promote_resource_attributes"]) <= ours


def test_rules_ask_for_metrics_there_are() -> None:
    """Recording rules and alerts name metrics and labels of ours."""
    records = []
    for group in load("prometheus-rules.yaml")["groups"]:
        for rule in group["rules"]:
            check_expression(rule["expr"], set())
            records.append(rule.get("record"))
            for text in rule.get("annotations", {}).values():
                asked = set(re.findall(r"\$labels\.(\w+)", text))
                (name,) = set(re.findall(r"\bcirron_\w+", rule["expr"]))
                assert asked <= prometheus_names()[name]
    assert "megatron_training_loss" in records


# --- Grafana --------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """The provisioned data sources: their types by uid."""
    found = load("grafana/provisioning/datasources/cirron.yaml")["datasources"]
    return {one["uid"]: one["type"] for one in found}


def test_data_sources_lead_to_services() -> None:
    """Each data source's URL is a service of the composition; links among them resolve."""
    document = load("grafana/provisioning/datasources/cirron.yaml")
    services = load("compose.yaml")["services"]
    assert set(sources().values()) == {"prometheus", "tempo", "jaeger"}
    for one in document["datasources"]:
        parts = urlsplit(one["url"])
        assert parts.hostname in services
        assert parts.port in ports_of(str(parts.hostname))
    assert set(values(document, "datasourceUid")) <= set(sources())
    (query,) = values(document, "query")
    check_expression(query.replace("{$$__tags}", ""), set())
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every panel's source, metric, label, variable and attribute exists; no two overlap."""
    dashboard = load("grafana/dashboards/training.json")
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    known = {value for key, value in vars(semconv).items() if key.isupper()}
    seen = set()
    cells: set[tuple[int, int]] = set()
    for thing in (*dashboard["panels"], *variables.values()):
        assert sources()[thing["datasource"]["uid"]] == thing["datasource"]["type"]
    for variable in variables.values():
        expression, label = re.fullmatch(
            r"label_values\((.*), (\w+)\)", variable["query"]["query"]
        ).groups()  # type: ignore[union-attr] # the assertion of this line
        check_expression(f"sum by ({label}) ({expression})", set(variables))
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"])
               for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            if target["datasource"]["type"] == "prometheus":
                check_expression(target["expr"], set(variables))
                seen.update(re.findall(r"\bcirron_\w+", target["expr"]))
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    assert label in set.union(*prometheus_names().values())
            else:
                query = target["query"]
                names = re.findall(r"(?:resource|span)\.([\w.]+)", query)
                assert names
                for name in names:
                    assert name in known or name == f"{semconv.MARK_PREFIX}loss"
                assert set(re.findall(r"\$(\w+)", query)) <= set(variables)
        for link in panel["fieldConfig"]["defaults"].get("links", ()):
            assert '"datasource":"cirron-tempo"' in unquote(link["url"])
    exemplars = [
        panel["title"] for panel in dashboard["panels"]
        if any(target.get("exemplar") for target in panel["targets"])
    ]  # fmt: skip
    assert {"Loss", "Step duration"} <= set(exemplars)
    assert {"cirron_train_loss", "cirron_step_duration_seconds_bucket", "cirron_queue_size_bytes",
            "cirron_phase_duration_seconds_sum", "cirron_dropped_total"} <= seen  # fmt: skip


@pytest.mark.parametrize(
    "expression",
    ["cirron_train_los", 'cirron_train_loss{rnk="1"}', "sum by (rnk) (cirron_train_loss)",
     'cirron_train_loss{dl_rank="$other"}', "rate(cirron_step_duration_bucket[1m])"],
)  # fmt: skip
def test_the_check_finds_what_is_wrong(expression: str) -> None:
    """A misspelt metric, label or variable does not pass."""
    with pytest.raises(AssertionError):
        check_expression(expression, {"run"})


def test_every_file_is_read() -> None:
    """Nothing lies in the directory that no test looks at."""
    found = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert found == {
        "compose.yaml", "collector.yaml", "tempo.yaml", "prometheus.yaml", "prometheus-rules.yaml",
        "grafana/provisioning/datasources/cirron.yaml",
        "grafana/provisioning/dashboards/cirron.yaml", "grafana/dashboards/training.json",
    }  # fmt: skip
