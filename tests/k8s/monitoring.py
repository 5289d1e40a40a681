"""The Prometheus queries of the dashboard and the alert rules."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from k8s.composed import K8S

MONITORING = K8S / "components" / "monitoring"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return found


def dashboard_queries() -> list[str]:
    return [one["expr"] for panel in dashboard()["panels"] for one in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names_in(queries: list[str]) -> set[str]:
    """Samples of ours that queries ask for."""
    return set(re.findall(r"\beffuse_[a-z0-9_]+", " ".join(queries)))
