"""`effuse bench` reads datasets strictly and counts what a server of known figures answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest

from effuse.cli import bench
from effuse.cli.figures import Run
from effuse.client.params import Params
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc as pb_grpc


class FakeRouter(pb_grpc.GenerationServiceServicer):
    """Answers each prompt with two commits of three tokens; refuses the prompt "bad"."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0

    async def GenerateStream(  # type: ignore[override]
        self,
        request: pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext[pb.GenerateStreamRequest, pb.GenerateStreamResponse],
    ) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if request.request.prompt == "bad":
            self.running -= 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a bad prompt")
        for offset in (0, 3):
            commit = pb.BlockCommit(token_offset=offset, num_tokens=3, text="abc")
            await context.write(pb.GenerateStreamResponse(commit=commit))
        finished = pb.Finished(
            usage=pb.Usage(completion_tokens=6), stats=pb.GenerationStats(forward_passes=2)
        )
        self.running -= 1
        await context.write(pb.GenerateStreamResponse(finished=finished))

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        raise NotImplementedError

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        raise NotImplementedError


def _bench(prompts: tuple[str, ...], concurrency: int) -> tuple[Run, FakeRouter, int]:
    async def run() -> tuple[Run, FakeRouter, int]:
        server, router = grpc.aio.server(), FakeRouter()
        ticks: list[int] = []
        pb_grpc.add_GenerationServiceServicer_to_server(router, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        job = bench.BenchJob(
            prompts=prompts,
            params=Params(),
            target=f"127.0.0.1:{port}",
            concurrency=concurrency,
            timeout_s=20.0,
            baseline=False,
            model_dir=Path(),
            adapter=None,
            json=None,
        )
        try:
            told = await bench.run_fleet(job, lambda: ticks.append(1))
        finally:
            await server.stop(None)
        return told, router, len(ticks)

    return asyncio.run(run())


def test_every_prompt_is_counted_once() -> None:
    told, router, ticks = _bench(tuple("abcdefgh"), concurrency=3)
    assert (len(told.samples), told.failed, ticks) == (8, 0, 8)
    assert (told.tokens, told.tokens_per_forward) == (48, 3.0)
    assert all(0 < one.first_block_s <= one.total_s <= told.total_s for one in told.samples)
    assert router.most_running <= 3


def test_a_failed_request_is_reported_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    told, _, ticks = _bench(("a", "bad", "b", "bad"), concurrency=1)
    assert (len(told.samples), told.failed, ticks) == (2, 2, 4)
    assert "2 x INVALID_ARGUMENT: a bad prompt" in capsys.readouterr().err


def test_a_dataset_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {n}", "answer": "1"}) for n in range(3)]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(lines))
    assert bench.read_prompts(path) == ["question 0", "question 1", "question 2"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected one JSON object a line, found none"),
        ('{"prompt": "a"}\nnot json', ":2: expected a JSON object, got 'not json'"),
        ('{"question": "a"}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": ""}', ':1: expected {"prompt": "..."}'),
        ('{"prompt": "\\ud800"}', ':1: expected {"prompt": "..."}'),
        ("[1]", ':1: expected {"prompt": "..."}'),
    ],
)
def test_a_bad_dataset_names_its_line(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(bench.DatasetError) as refused:
        bench.read_prompts(path)
    assert told in str(refused.value)


def test_a_dataset_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(bench.DatasetError, match="expected UTF-8 text"):
        bench.read_prompts(path)


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', newline="")
    assert bench.read_prompts(path) == ["a\u2028b", "c"]


def test_a_knob_that_the_baselines_lack_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--window", "2"]
    assert bench.parse(flags).baseline
    with pytest.raises(SystemExit):
        bench.parse([*flags, "--temperature", "0.5", "--stop-token-id", "3"])
    assert "got --stop-token-id, --temperature too" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}')
    flags = ["--dataset", str(path), "--baseline", "--model-dir", str(tmp_path)]
    assert bench.main(flags) == 2
    assert f"effuse bench: {tmp_path} has no tokenizer.json" in capsys.readouterr().err
