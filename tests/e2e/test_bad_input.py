"""Bad input gets the right status with a helpful message, and costs no worker its life.

Every class is sent to a live fleet whose routers require keys. The time of refusals is printed
(`pytest -s` shows it), and for the slowest also the time of a gRPC server that only refuses. It is
not a condition, because tests never assert on time. A bomb is slow for its client, which compresses
it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
import pytest
from bad_input.case import Case, Outcome, send
from bad_input.clients import ANOTHERS, client_cases, good
from bad_input.gateways import gateway_cases
from bad_input.http2 import ask
from bad_input.requests import Facts
from bad_input.wire import spoken_by_hand, wire_cases
from bad_input.workers import worker_cases
from e2e.client import load_of, wait_until
from e2e.processes import pids, standing_still
from e2e.tiny import TINY, tiny_checkpoint
from tokenizers import Tokenizer

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet
from effuse.protos.rpc import CALLER_KEEPALIVE, PUBLIC_LIMITS, server_options
from effuse.router.tenants import Tenant, line_of
from effuse.v1 import generation_pb2 as pb
from effuse.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc

PAD = 258
FACTS = Facts(
    vocab_size=TINY.vocab_size,
    block_size=TINY.block_size,
    max_model_len=TINY.max_model_len,
    mask=TINY.mask_token_id,
    pad=PAD,
)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}{{ message.content }}{% endfor %}"
)
TOKENS = {"mine": "effuse-mine", "theirs": "effuse-theirs"}
BEFOREHAND: dict[str, Case] = dict(
    pair for table in (client_cases(FACTS), gateway_cases(FACTS), wire_cases()) for pair in table
)
BY_HAND = {name: (said, ending) for name, said, ending in spoken_by_hand(TOKENS["mine"])}
TO_WORKERS: dict[str, Case] = dict(worker_cases(FACTS, "decode life", "prefill life"))


def test_there_are_so_many_classes() -> None:
    assert len(BEFOREHAND) + len(BY_HAND) + len(TO_WORKERS) > 350


@dataclass
class Site:
    """The fleet, channels to it, and how it was before anything bad came."""

    fleet: Fleet
    channels: dict[str, grpc.Channel]
    stub: generation_pb2_grpc.GenerationServiceStub = field(init=False)
    lives: dict[str, str] = field(init=False)  # of engines, by worker
    processes: set[int] = field(init=False)
    took: dict[str, float] = field(default_factory=dict)  # seconds, by class

    def __post_init__(self) -> None:
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channels["router"])
        self.lives, self.processes = self.lives_now(), self.processes_now()

    def lives_now(self) -> dict[str, str]:
        """Incarnations of workers with a valid lease that accept requests."""
        models = model_pb2_grpc.ModelServiceStub(self.channels["router"])
        listed = models.ListWorkers(
            model_pb2.ListWorkersRequest(), timeout=30, metadata=shown("mine")
        )
        return {
            one.worker_id: one.incarnation
            for one in listed.workers
            if one.state == model_pb2.WORKER_STATE_READY
        }

    def processes_now(self) -> set[int]:
        """All that this process has started; the fleet's are among them."""
        return pids(os.getpid())

    def life_of(self, name: str) -> str:
        (found,) = (life for worker, life in self.lives.items() if name.split("-")[0] in worker)
        return found

    def answers(self) -> bool:
        asked = self.stub.Generate(good(), timeout=60, metadata=shown("mine"))
        return bool(asked.usage.completion_tokens)

    def check_alive(self) -> None:
        assert self.lives_now() == self.lives
        assert self.processes_now() == self.processes


def shown(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[tenant]}"),)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("bad")
    keys = home / "keys"
    keys.write_text("".join(f"{line_of(TOKENS[one], Tenant(one))}\n" for one in TOKENS))
    config = FleetConfig(
        model=_checkpoint(home / "sdar"),
        worker_flags=(
            *("--device", "cpu", "--num-pages", "256", "--hang-timeout-s", "30"),
            *("--max-model-len", str(TINY.max_model_len)),
        ),
        decode_flags=("--default-algorithm", "d2f"),
        router_flags=("--keys", str(keys)),
        has_secret=False,  # workers are asked, too
    )
    with Fleet(config) as fleet:
        names = ("router", "prefill-0", "decode-0")
        channels = {name: grpc.insecure_channel(fleet.address_of(name)) for name in names}
        made = Site(fleet, channels)
        theirs = good()
        theirs.request_id = ANOTHERS
        made.stub.Generate(theirs, timeout=60, metadata=shown("theirs"))
        yield made
        made.check_alive()
        for channel in channels.values():
            channel.close()
        _report(made.took)


def _checkpoint(path: Path) -> Path:
    """One with a chat template and a reserved token."""
    tiny_checkpoint(path, "sdar")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    word = json.dumps(tokenizer.id_to_token(PAD))
    tokenizer = Tokenizer.from_str(tokenizer.to_str().replace(f"{word}:", '"<|pad|>":'))
    tokenizer.add_special_tokens(["<|pad|>"])
    assert tokenizer.token_to_id("<|pad|>") == PAD
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def _report(took: dict[str, float]) -> None:
    slow = sorted(took, key=lambda name: took[name])[-5:]
    bare = _bare_took([(BEFOREHAND | TO_WORKERS)[name] for name in slow])
    told = ", ".join(
        f"{name} {took[name] * 1e3:.1f} ms (bare {one * 1e3:.1f})"
        for name, one in zip(slow, bare, strict=True)
    )
    middle = median(took.values())
    print(f"\n{len(took)} refusals, half of them within {middle * 1e3:.1f} ms; slowest: {told}")


def _bare_took(cases: list[Case]) -> list[float]:
    """Seconds, each after a call that connects, on a server with our limits and no method."""
    options = server_options(PUBLIC_LIMITS, CALLER_KEEPALIVE)
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    took = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        send(channel, BEFOREHAND["truncated"], ())
        for case in cases:
            began = time.monotonic()
            send(channel, case, shown("mine"))
            took.append(time.monotonic() - began)
    server.stop(0).wait()
    return took


class Refusing(grpc.GenericRpcHandler):
    """Reads a call's messages, of whatever method, and refuses it."""

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            list(requests)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused")
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.mark.parametrize("name", BEFOREHAND)
def test_what_clients_get_wrong_is_refused(site: Site, name: str) -> None:
    _check(site, name, BEFOREHAND[name])


@pytest.mark.parametrize("name", TO_WORKERS)
def test_what_workers_are_told_wrong_is_refused(site: Site, name: str) -> None:
    cases = dict(worker_cases(FACTS, site.life_of("decode"), site.life_of("prefill")))
    _check(site, name, cases[name])


def _check(site: Site, name: str, case: Case) -> None:
    began = time.monotonic()
    found: Outcome = send(site.channels[case.to], case, shown("mine"))
    site.took[name] = time.monotonic() - began
    case.check(found)
    site.check_alive()


@pytest.mark.parametrize("name", BY_HAND)
def test_what_no_library_would_say_ends(site: Site, name: str) -> None:
    said, endings = BY_HAND[name]
    assert ask(site.fleet.address, said) in endings.split()
    site.check_alive()


def test_the_id_of_a_running_request(site: Site) -> None:
    """The first request cannot go on while a second one asks for its id."""
    first = good()
    first.request_id = "twice"
    mine = shown("mine")
    with standing_still(site.fleet.processes["decode-0"].pid):
        asked = pb.GenerateStreamRequest(request=first)
        events = site.stub.GenerateStream(asked, timeout=60, metadata=mine)
        wait_until(_is_attempted(site, "twice"), "the first request never ran")
        twice = Case(
            method="/effuse.v1.GenerationService/Generate",
            sent=[first],
            code=grpc.StatusCode.ALREADY_EXISTS,
            reason="ALREADY_RUNNING",
            said="twice",
        )
        twice.check(send(site.channels["router"], twice, mine))
    assert list(events)[-1].HasField("finished")
    again = site.stub.Generate(first, timeout=60, metadata=mine)
    assert again.usage.completion_tokens > 0, "the id is free again"


def _is_attempted(site: Site, name: str) -> Callable[[], bool]:
    asked = pb.GetRequestRequest(request_id=name)

    def is_so() -> bool:
        try:
            found = site.stub.GetRequest(asked, timeout=30, metadata=shown("mine"))
        except grpc.RpcError:
            return False
        return bool(found.attempt)

    return is_so


def test_nothing_of_all_that_is_left(site: Site) -> None:
    assert site.answers()
    for name in ("prefill-0", "decode-0"):
        address = site.fleet.address_of(name)
        wait_until(lambda at=address: _is_empty(at), f"{name} still holds something")  # type: ignore[misc]
    site.check_alive()


def _is_empty(address: str) -> bool:
    load = load_of(address)
    held = load.running + load.waiting + load.quarantined_pages
    return not held and load.free_pages == load.total_pages and not load.draining
