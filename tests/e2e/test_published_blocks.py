"""Block diffusion in a split fleet: the tokens of the authors' own code over either connector,
with prompts handed over. SDAR is test_equality.py's, larger blocks test_degrees.py's."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.client import all_at_once, connect
from e2e.kept import FAST_DLLM_V2, LLADA2_SMALL, Family
from e2e.tiny import fleet_of

from effuse.client.params import make_request


@pytest.mark.parametrize(
    ("connector", "family"),
    [("zmq", LLADA2_SMALL), ("nixl", FAST_DLLM_V2)],
    ids=["llada2-zmq", "v2-nixl"],
)
def test_tokens_are_those_of_the_authors_code(
    connector: str, family: Family, tmp_path: Path
) -> None:
    kept = family.runs(family.block_size)
    assert len(kept) > 8
    model = family.write(tmp_path / "model", family.block_size)
    with fleet_of(model, connector=connector) as fleet, connect(fleet.address) as client:
        answers = all_at_once(
            client.generate, [make_request(run.prompt, run.params, token_ids=True) for run in kept]
        )
    for run, answer in zip(kept, answers, strict=True):
        assert list(answer.token_ids) == list(run.tokens), run
        assert answer.stats.prefill_worker == "prefill-0"
        assert answer.stats.connector == connector
        assert (answer.stats.kv_pages > 0) == (len(run.prompt) >= family.block_size)
    assert any(answer.stats.kv_pages for answer in answers)
