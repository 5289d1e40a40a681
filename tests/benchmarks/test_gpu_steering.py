"""The table of workers without roles against both fixed forms."""

from __future__ import annotations

from typing import Any

from effuse.benchmarks.gpu_steering import AUTO, FORMS, PLANS, fleet_config, report


def row(fleet: str, load: str, tokens_per_s: float, kept: dict[str, int] | None = None) -> Any:
    return {"fleet": fleet, "load": load, "tokens_per_s": tokens_per_s, "kept": kept or {}}


def test_the_ratio_is_of_medians_over_the_better_fixed_form() -> None:
    one, other = (name for name in FORMS if name != AUTO)
    rows = [row(one, "a x 4", value) for value in (10, 1, 20)]
    rows += [row(other, "a x 4", value) for value in (9, 8, 300)]
    rows += [row(AUTO, "a x 4", value) for value in (5, 5, 90)]
    *_, line = report(rows).splitlines()
    assert line == "| a x 4 | tokens/s | 10.0 | 9.0 | 5.0 | 0.50 |"


def test_goodput_counts_by_its_objective() -> None:
    """Fixed forms are measured once for both, and workers without roles with each."""
    one, other = (name for name in FORMS if name != AUTO)
    rows = [row(one, "4/s", 1, {"2": 8, "4": 10}), row(other, "4/s", 1, {"2": 4, "4": 20})]
    rows += [row(AUTO, "4/s", 1, {"2": 6}), row(AUTO, "4/s", 1, {"4": 10})]
    *_, two, four = report(rows).splitlines()
    assert two == "| 4/s | kept within 2 gaps | 8.0 | 4.0 | 6.0 | 0.75 |"
    assert four == "| 4/s | kept within 4 gaps | 10.0 | 20.0 | 10.0 | 0.50 |"


def test_each_form_has_two_workers(tmp_path: Any) -> None:
    for name in FORMS:
        config = fleet_config(PLANS["tiny"], name, tmp_path, ["0", "1"], tmp_path)
        assert config.prefill + config.decode + config.workers == 2
        assert len({one.gpu for one in config.assignments().values()}) == 2
