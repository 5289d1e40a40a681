"""`effuse status` with given workers, with a real fleet and without one."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import pytest
from slowness import patient

from effuse.cli.__main__ import main
from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.cli.status import as_json, as_text
from effuse.v1 import model_pb2 as pb
from effuse.v1.generation_pb2 import ALGORITHM_BLOCK_DIFFUSION, DecodingParams, SamplingParams

PREFILL = pb.Worker(
    worker_id="prefill-0", role=pb.WORKER_ROLE_PREFILL, state=pb.WORKER_STATE_READY, model="m",
    total_pages=64, free_pages=60, max_num_seqs=8, steps=12,
    links=[
        pb.WorkerLink(peer="decode-0", transport="cuda_ipc", gigabytes_per_second=213.44),
        pb.WorkerLink(peer="decode-1", transport="tcp", gigabytes_per_second=1.2, refused=True),
    ],
)  # fmt: skip
DECODE = pb.Worker(
    worker_id="decode-0", role=pb.WORKER_ROLE_DECODE, state=pb.WORKER_STATE_READY, model="m",
    total_pages=64, free_pages=10, quarantined_pages=4, max_num_seqs=8, running=3, waiting=2,
    quarantines=[
        pb.WorkerQuarantine(writer="10.0.0.7:50052", pages=4, age=timedelta(seconds=41.7))
    ],
)  # fmt: skip


def test_a_line_for_each_worker() -> None:
    heading, first, second, *links, summary = as_text([DECODE, PREFILL]).splitlines()
    assert heading.split() == [
        *("worker", "role", "state", "model", "running", "waiting", "pages", "free", "steps"),
    ]
    assert first.split() == [
        *("decode-0", "decode", "ready", "m", "3", "of", "8", "2"),
        *("10", "of", "64,", "4", "in", "quarantine", "0"),
    ]
    assert second.split()[:3] == ["prefill-0", "prefill", "ready"]
    assert links == [
        "prefill-0 to decode-0: cuda_ipc, 213 GB/s",
        "prefill-0 to decode-1: tcp, 1.2 GB/s, refused",
        "decode-0: 4 pages in quarantine for 42 s, until 10.0.0.7:50052 releases them",
    ]
    assert summary == "1 prefill worker and 1 decode worker are ready"


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ("b", "1 worker that prefills and decodes is ready"),
        ("bb", "2 workers that prefill and decode are ready"),
        ("db", "1 decode worker and 1 worker that prefills and decodes are ready"),
        ("ppdd", "2 prefill and 2 decode workers are ready"),
    ],
)
def test_the_last_line_counts_ready_workers(roles: str, told: str) -> None:
    of = {"p": PREFILL, "d": DECODE, "b": pb.Worker(role=pb.WORKER_ROLE_BOTH, state=DECODE.state)}
    assert as_text([of[one] for one in roles]).splitlines()[-1] == told


def test_a_worker_of_several_devices_shows_how_many() -> None:
    worker = pb.Worker()
    worker.CopyFrom(DECODE)
    worker.ranks = 2
    assert "decode on 2 devices" in as_text([worker])
    worker.ranks, worker.context_ranks = 4, 2
    assert "decode on 4 devices, context split over 2" in as_text([worker])
    worker.ranks, worker.context_ranks, worker.stages = 4, 1, 2
    assert "decode on 4 devices in 2 stages" in as_text([worker])
    worker.ranks = worker.stages = 1
    assert "devices" not in as_text([worker])


def test_names_are_shown_as_they_are() -> None:
    """A model has that of its directory, which may look like what rich reads as markup."""
    worker = pb.Worker()
    worker.CopyFrom(DECODE)
    worker.model = "m[bold]:smile:[/b]"
    assert "m[bold]:smile:[/b]" in as_text([worker])


def test_a_fleet_that_cannot_answer_says_so() -> None:
    draining = pb.Worker()
    draining.CopyFrom(DECODE)
    draining.state = pb.WORKER_STATE_DRAINING
    for workers in ([], [PREFILL], [PREFILL, draining]):
        assert as_text(workers).splitlines()[-1].endswith("no worker can answer a request")


def test_where_defaults_are_from() -> None:
    model = pb.Model(
        name="m",
        block_size=4,
        eos_token_ids=[7, 8],
        defaults=pb.ModelDefaults(
            sampling=SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
            decoding=DecodingParams(algorithm=ALGORITHM_BLOCK_DIFFUSION),
            max_tokens=768,
            sources=[
                pb.DefaultSource(knob=knob, source=source)
                for source, knobs in {
                    "generation_config.json": ("temperature", "top_k", "max_tokens"),
                    "SDAR's generate.py": ("algorithm", "block_size"),
                    "--a-flag": ("top_p",),
                    "another version": ("a knob that is not known here",),
                    "config.json": ("eos_token_ids",),
                }.items()
                for knob in knobs
            ],
        ),
    )
    *_, first, second, third, fourth, fifth, _ = as_text([DECODE], [model]).splitlines()
    assert first == (
        "m took temperature 0.6, top_k 20 and max_tokens 768 from generation_config.json"
    )
    assert second == "m took algorithm block_diffusion and block_size 4 from SDAR's generate.py"
    assert third == "m took top_p 0.95 from --a-flag"
    assert fourth == "m took a knob that is not known here from another version"
    assert fifth == "m took eos_token_ids 7 8 from config.json"
    del model.eos_token_ids[1:]
    assert "m took eos_token_id 7 from config.json" in as_text([DECODE], [model])


def test_json_holds_every_field() -> None:
    (told,) = json.loads(as_json([DECODE]))
    assert set(told) == {field.name for field in pb.Worker.DESCRIPTOR.fields}
    assert (told["worker_id"], told["running"], told["steps"]) == ("decode-0", 3, "0")


def test_a_running_fleet_of_which_no_worker_takes_another_role(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--device", "cpu", "--num-pages", "256")
    with Fleet(FleetConfig(worker_flags=flags)) as fleet:
        deadline = time.monotonic() + patient(60)
        while True:  # a link is measured a moment after the start
            assert main(["status", "--target", fleet.address, "--json"]) == 0
            told = {one["worker_id"]: one for one in json.loads(capsys.readouterr().out)}
            if told["prefill-0"]["links"]:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        fleet.home.write_page("http://127.0.0.1:9/")
        assert main(["status", "--target", fleet.address]) == 0
        metrics = ", ".join(f"{name} {at}" for name, at in sorted(fleet.metrics().items()))
        shown = capsys.readouterr().out
        assert main(["role", "decode-0", "both", "--target", fleet.address]) == 1
        assert "always a decode worker" in capsys.readouterr().err
    assert told["decode-0"]["total_pages"] == 256
    assert told["prefill-0"]["links"][0]["transport"] == "cma"  # NIXL, which auto chooses here
    assert "1 prefill worker and 1 decode worker are ready" in shown
    places = [f"gRPC: {fleet.config.host}", "page: http://127.0.0.1:9/", f"metrics: {metrics}"]
    assert all(f"\n{place}" in shown for place in places)


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--target", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert "effuse status: " in capsys.readouterr().err


def test_a_model_whose_answers_do_not_depend_on_others_is_named() -> None:
    models = [pb.Model(name="a", deterministic=True), pb.Model(name="b")]
    lines = as_text([DECODE], models).splitlines()
    assert "a is deterministic" in lines and not any(line.startswith("b is") for line in lines)
