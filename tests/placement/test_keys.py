"""Key names: one hash tag a fleet, and no name that could reach another fleet's keys."""

from __future__ import annotations

import pytest

from effuse.placement.records import check_name
from effuse.placement.store import Keys


def test_all_keys_of_a_fleet_share_its_hash_tag() -> None:
    keys = Keys("blue")
    names = [keys.worker("w"), keys.workers, keys.request("r"), keys.running, keys.ended]
    assert {name[name.index("{") + 1 : name.index("}")] for name in names} == {"blue"}
    assert len(set(names)) == 5


@pytest.mark.parametrize("name", ["", "a}b", "a{b", "a b", ".a", "a/b", "a*", "x" * 129, "a\n"])
def test_names_that_are_refused_with_the_accepted_form(name: str) -> None:
    with pytest.raises(ValueError, match="expected 1 to 128 letters"):
        check_name("fleet", name)
    with pytest.raises(ValueError, match="fleet"):
        Keys(name)


@pytest.mark.parametrize("name", ["a", "fleet-1", "prefill-0.ns_x", "0"])
def test_names_that_are_taken(name: str) -> None:
    assert check_name("worker id", name) == name
