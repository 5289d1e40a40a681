"""The lines of `effuse up` about a fleet that is ready: at most eight rows, however narrow."""

from __future__ import annotations

import pytest

from effuse.cli.commands import FleetConfig
from effuse.cli.gpus import Assignment
from effuse.cli.screen import laid_out, metrics_text, model_text, workers_text
from effuse.v1 import model_pb2 as pb
from effuse.v1.generation_pb2 import ALGORITHM_BLOCK_DIFFUSION, DecodingParams, SamplingParams

MODEL = pb.Model(
    name="SDAR-1.7B-Chat",
    block_size=4,
    eos_token_ids=[151643],
    defaults=pb.ModelDefaults(
        sampling=SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
        decoding=DecodingParams(algorithm=ALGORITHM_BLOCK_DIFFUSION, denoising_steps=4),
        sources=[
            pb.DefaultSource(knob=knob, source=source)
            for source, knobs in {
                "config.json": ("eos_token_ids",),
                "generation_config.json": ("temperature", "top_p", "top_k"),
                "SDAR's generate.py": ("algorithm", "denoising_steps"),
            }.items()
            for knob in knobs
        ],
    ),
)


def _entries(prefill: int, decode: int, width: int | None) -> list[tuple[str, str]]:
    config = FleetConfig(prefill=prefill, decode=decode)
    names = [
        f"{role}-{at}" for role, n in (("prefill", prefill), ("decode", decode)) for at in range(n)
    ]
    gpus = {name: Assignment(str(at), 1) for at, name in enumerate(names)}
    links = [
        pb.WorkerLink(peer=f"decode-{at}", transport="cuda_ipc", gigabytes_per_second=180 + at)
        for at in range(decode)
    ]
    workers = [pb.Worker(worker_id=name, links=links) for name in names if name[0] == "p"]
    metrics = {name: f"127.0.0.1:{at + 40000}" for at, name in enumerate(["router", *names])}
    return [
        ("model", model_text(config, [MODEL])),
        ("workers", workers_text(config, gpus, workers)),
        ("gRPC", "effuse is ready on 127.0.0.1:50051 after 12.3 s"),
        ("HTTP", "http://127.0.0.1:8000/v1"),
        ("page", "http://127.0.0.1:33871/"),
        ("metrics", metrics_text(metrics, width)),
    ]


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (8, 8), (0, 4)])
def test_a_terminal_shows_at_most_eight_rows(prefill: int, decode: int, width: int) -> None:
    entries = _entries(prefill, decode, width)
    rows = laid_out(entries, width)
    assert len(rows) <= 8 and max(map(len, rows)) <= width
    labels = [row.split()[0] for row in rows if not row.startswith(" ")]
    assert labels == [label for label, _ in entries]
    shown = " ".join(row[9:] for row in rows)
    assert "algorithm block_diffusion, denoising_steps 4 (SDAR's generate.py)" in shown
    assert all(url in shown for url in ("127.0.0.1:50051", "8000/v1", "33871/", "router 127.0.0.1"))


@pytest.mark.parametrize("width", [0, 1, 12])
def test_a_terminal_of_a_few_columns_shows_as_many_as_it_wraps(width: int) -> None:
    assert laid_out(_entries(2, 2, 40), width) == laid_out(_entries(2, 2, 40), 40)


def test_what_does_not_fit_is_cut() -> None:
    rows = laid_out([("model", "word " * 200), *_entries(2, 2, 60)[1:]], 60)
    assert len(rows) == 8
    assert [row.endswith(" ..") for row in rows].count(True) == 1
    assert metrics_text({"router": "a:1", "decode-0": "b:2"}, 20) == (
        "router a:1; `effuse status` has 1 more"
    )


def test_a_file_has_a_line_for_each() -> None:
    lines = laid_out(_entries(2, 2, None), None)
    assert len(lines) == 6
    assert lines[0] == (
        "model    SDAR-1.7B-Chat: algorithm block_diffusion, denoising_steps 4 "
        "(SDAR's generate.py), eos_token_id 151643 (config.json), "
        "temperature 0.6, top_p 0.95, top_k 20 (generation_config.json)"
    )
    assert lines[1] == (
        "workers  prefill GPU 0, GPU 1; decode GPU 2, GPU 3; 4 links cuda_ipc, 180 to 181 GB/s"
    )
    assert lines[-1].endswith("decode-1 127.0.0.1:40004")


def test_links_that_are_refused_are_counted() -> None:
    links = [
        pb.WorkerLink(peer="decode-0", transport="tcp", gigabytes_per_second=1.25, refused=True),
    ]
    text = workers_text(FleetConfig(), {}, [pb.Worker(links=links)])
    assert text == "1 prefill, 1 decode on the CPU; link tcp, 1.25 GB/s, 1 refused"


def test_a_fleet_that_answers_only_known_clients_has_a_line_too() -> None:
    assert model_text(FleetConfig(), ()) == "the bundled model"
    assert workers_text(FleetConfig(prefill=0), {}, ()) == "1 decode on the CPU"
