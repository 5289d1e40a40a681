"""The dashboard and the alert rules ask for metrics that there are, and reach the processes."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import yaml
from every_metric import router_metrics, sample_names, worker_metrics
from k8s.charted import pods
from k8s.composed import K8S, deployments, kustomized, overlay, with_components
from k8s.monitoring import MONITORING, alerts, dashboard, dashboard_queries, names_in

from effuse.cli.commands import value_of
from effuse.placement.records import Role
from effuse.router.metrics import BY_CLIENTS

pytestmark = pytest.mark.chart
DOCS = K8S.parent / "docs"
ALERTED = [rule["expr"] for rule in alerts()]
QUERIES = [*dashboard_queries(), *ALERTED]


def test_every_metric_that_is_asked_for_is_served() -> None:
    families = [*router_metrics().families(), *worker_metrics().families()]
    served = {name for family in families for name in sample_names(family)}
    asked = names_in(QUERIES)
    assert len(asked) > 25
    assert not asked - served


@pytest.mark.parametrize("query", QUERIES)
def test_brackets_and_quotes_are_closed(query: str) -> None:
    bare = re.sub(r'"[^"]*"', "", query)
    assert '"' not in bare
    for one, other in ("()", "[]", "{}"):
        assert bare.count(one) == bare.count(other)


@pytest.mark.parametrize("query", ALERTED)
def test_an_alert_is_about_one_fleet(query: str) -> None:
    """Otherwise a healthy fleet outweighs one that answers nothing."""
    sums = re.findall(r"\b(?:sum|min|max|avg|count|group)\b(?: ?(by|without) \(([^)]*)\))?", query)
    for kind, labels in sums:
        named = set(re.split(r",\s*", labels))
        kept = {"namespace", "fleet"} if " unless " in query else {"job", "namespace", "fleet"}
        assert kind == "without" or kept <= named, query
        assert kind == "by" or not {"job", "namespace", "fleet"} & named, query


def test_operators_find_a_remedy_for_each_alert() -> None:
    rows = re.findall(r"(?m)^\| `(Effuse\w+)` \| .+ \|$", (DOCS / "operations.md").read_text())
    assert rows == [rule["alert"] for rule in alerts()]


@pytest.mark.parametrize("query", dashboard_queries())
def test_a_panel_is_about_the_fleets_that_are_chosen(query: str) -> None:
    chosen = 'namespace=~"$namespace", fleet=~"$fleet"'
    selected = re.findall(r"\b(?:effuse|process)_[a-z0-9_]+(?:\{([^}]*)\})?", query)
    assert selected and all(chosen in one for one in selected)


def test_each_choice_of_the_dashboard_may_be_all_of_them() -> None:
    """Also of fleets without such a label: outside of Kubernetes there is no namespace."""
    chosen = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert {"namespace", "fleet", "model_name"} < set(chosen)
    for name in ("namespace", "fleet"):
        assert (chosen[name]["current"]["value"], chosen[name]["allValue"]) == ("$__all", ".*")


def test_a_histogram_is_asked_by_its_bounds_and_a_counter_by_its_growth() -> None:
    for query in QUERIES:
        for name in names_in([query]):
            grows = name.endswith(("_total", "_sum", "_count", "_bucket"))
            assert (re.search(rf"(rate|increase)\({name}\b", query) is not None) == grows, query
            assert name.endswith("_bucket") <= ("histogram_quantile" in query and "le" in query)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_an_alert_says_how_bad_it_is_and_what_it_means() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert len(rule["annotations"]["summary"]) > 20


def test_the_rules_for_the_operator_are_the_same() -> None:
    (rule,) = [one for kind, one in overlay("operator-1p1d").items() if kind[0] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((MONITORING / "alerts.yaml").read_text())


def test_the_operator_reads_the_port_and_the_name_that_scalers_ask_for() -> None:
    found = overlay("operator-1p1d")
    service, monitor = found["Service", "metrics"], found["ServiceMonitor", "fleet"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    (label,) = endpoint["relabelings"]
    for (kind, _), one in overlay("scaled-1p1d").items():
        if kind == "HorizontalPodAutoscaler":
            (metric,) = [one["external"]["metric"] for one in one["spec"]["metrics"]]
            assert metric["name"] in {*sample_names_of_router()}
            assert set(metric["selector"]["matchLabels"]) == {label["targetLabel"], "worker_role"}


def test_the_adapter_asks_prometheus_for_what_routers_serve_by_the_name_of_the_fleet() -> None:
    (config,) = _data_of("prometheus")
    (job,) = yaml.safe_load(config)["scrape_configs"]
    assert "fleet" in [one.get("target_label") for one in job["relabel_configs"]]
    (text,) = _data_of("adapter")
    (rule,) = yaml.safe_load(text)["externalRules"]
    assert rule["seriesQuery"] in sample_names_of_router()
    assert (
        "max by (model_name, worker_role)" in rule["metricsQuery"]
    )  # and not once for each router


def _data_of(name: str) -> list[str]:
    found = [one for one in kustomized(K8S / "prometheus") if one["kind"] == "ConfigMap"]
    (data,) = [one["data"] for one in found if one["metadata"]["name"].startswith(f"{name}-")]
    return list(data.values())


def sample_names_of_router() -> list[str]:
    return [name for family in router_metrics().families() for name in sample_names(family)]


def test_the_component_takes_every_file_of_its_folder() -> None:
    text = (MONITORING / "kustomization.yaml").read_text()
    assert not [path.name for path in MONITORING.iterdir() if path.name not in text
                and path.name != "kustomization.yaml"]  # fmt: skip
    generated = yaml.safe_load(text)["configMapGenerator"]
    assert {one["name"] for one in generated} == {"dashboard", "alerts"}


def test_every_process_of_a_monitored_overlay_serves_metrics_where_prometheus_may_read_them() -> (
    None
):
    monitored = deployments("monitored-1p1d")
    for name in ("router", "prefill", "decode"):
        template = monitored[name]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        (port,) = [one for one in container["ports"] if one["name"] == "metrics"]
        assert value_of(container["args"], "--metrics-port") == str(port["containerPort"])
        assert value_of(container["args"], "--metrics-host") == "0.0.0.0"
        assert template["metadata"]["annotations"]["prometheus.io/port"] == "9464"
    policy = overlay("monitored-1p1d")["NetworkPolicy", "metrics"]["spec"]
    assert policy["ingress"][0]["ports"] == [{"port": "metrics"}]
    (peer,) = policy["ingress"][0]["from"]
    (wanted,) = peer["podSelector"]["matchExpressions"]
    assert wanted["values"] == ["prometheus"]


def test_only_the_first_pod_of_a_worker_over_nodes_is_read_by_prometheus() -> None:
    """The others serve no metrics, so each would be a target that is always down."""
    for role in ("prefill", "decode"):
        group, _ = pods(with_components("gpu-hosts-1p1d", "monitoring"))[role]
        template = group["spec"]["leaderWorkerTemplate"]
        first, others = template["leaderTemplate"], template["workerTemplate"]
        (container,) = first["spec"]["containers"]
        assert container["ports"].pop()["name"] == "metrics"
        scraped = first["metadata"].pop("annotations")
        assert scraped == {"prometheus.io/scrape": "true", "prometheus.io/port": "9464"}
        assert not others["metadata"].pop("annotations", None)
        assert first == others
    plain, _ = pods(kustomized(K8S / "overlays" / "gpu-hosts-1p1d"))["decode"]
    assert "leaderTemplate" not in plain["spec"]["leaderWorkerTemplate"]


def test_workers_that_do_both_count_as_workers_that_decode() -> None:
    """A fleet may have no others, and no critical alert then."""
    (rule,) = [one for one in alerts() if one["alert"] == "EffuseNobodyDecodes"]
    (roles,) = re.findall(r'worker_role=~?"([^"]*)"', rule["expr"])
    assert {role for role in get_args(Role) if re.fullmatch(roles, role)} == {"decode", "both"}
    assert "sum without (worker_role)" in rule["expr"]


def test_a_fleet_that_has_lost_every_router_is_noticed_by_its_workers() -> None:
    """What routers serve is gone with them, and so is each alert about it."""
    (rule,) = [one for one in alerts() if one["alert"] == "EffuseNoRouter"]
    present, absent = (names_in([part]) for part in rule["expr"].split(" unless "))
    of_router = {*sample_names_of_router()}
    of_workers = {name for one in worker_metrics().families() for name in sample_names(one)}
    assert present <= of_workers - of_router and absent <= of_router - of_workers
    assert " unless on (namespace, fleet)" in rule["expr"]


def test_a_request_that_its_client_ended_or_mistook_has_not_failed() -> None:
    (rule,) = [one for one in alerts() if one["alert"] == "EffuseRequestsFail"]
    (left_out,) = re.findall(r'status!~"([^"]*)"', rule["expr"])
    assert set(left_out.split("|")) == {"OK", *BY_CLIENTS}
    (row,) = re.findall(r"`effuse_requests_total\{.*", (DOCS / "operations.md").read_text())
    assert {"OK", *BY_CLIENTS} == set(re.findall(r"\b[A-Z]{2}[A-Z_]*", row))


def test_a_tenant_beyond_its_own_limits_does_not_overload_the_fleet() -> None:
    """More workers, which the alert asks for, would not help."""
    (rule,) = [one for one in alerts() if one["alert"] == "EffuseRequestsRefused"]
    assert 'effuse_refused_total{status="RESOURCE_EXHAUSTED", quota!="true"}' in rule["expr"]


@pytest.mark.parametrize("query", QUERIES)
def test_workers_that_do_both_are_watched_like_others(query: str) -> None:
    for roles in re.findall(r'[{ ,]role=~?"([^"]*)"', query):
        assert roles == "router" or re.fullmatch(roles, "both"), roles
