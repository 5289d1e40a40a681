"""A fleet with certificates: it serves who shows one, and tells nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from certificates import Authority
from e2e.tiny import tiny_checkpoint

import effuse
from effuse.cli import generate, status
from effuse.cli.fleet import Fleet, FleetConfig
from effuse.protos.fleet_channel import FLEET_NAME
from effuse.protos.tls import TlsFiles
from effuse.router.keys import Tenant, line_of, make_token

TOKEN = make_token()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("sealed") / "ca")


@pytest.fixture(scope="module")
def fleet(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    inside, outside = authority.sign("fleet", FLEET_NAME), authority.sign("router")
    among = ("--fleet-cert", inside.cert, "--fleet-key", inside.key, "--fleet-ca", inside.ca)
    keys = authority.home / "keys"
    keys.write_text(line_of(TOKEN, Tenant("acme")))
    shown = ("--tls-cert", outside.cert, "--tls-key", outside.key, "--keys", keys)
    config = FleetConfig(
        model=tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "sdar", "sdar"),
        worker_flags=("--device", "cpu", "--num-pages", "64", *map(str, among)),
        router_flags=("--prefill", "remote", *map(str, (*among, *shown))),
    )
    with Fleet(config) as running:
        yield running


def test_answers_pass_through_it(fleet: Fleet, authority: Authority) -> None:
    tls = TlsFiles(ca=authority.cert)
    with effuse.Client(fleet.address, tls=tls, token=TOKEN) as client:
        answer = client.generate(list(range(1, 41)), effuse.Params(max_tokens=8))
    assert answer.stats.kv_bytes > 0


def test_commands_show_what_they_are_given(fleet: Fleet, authority: Authority) -> None:
    token = authority.home / "token"
    token.write_text(TOKEN)
    known = ("--target", fleet.address, "--tls-ca", str(authority.cert))
    shown = (*known, "--token-file", str(token))
    assert status.main(shown) == 0
    assert generate.main(["--ids", "1,2,3", "--max-tokens", "8", *shown]) == 0
    assert status.main(known) == 1
    assert status.main(["--target", fleet.address, "--timeout", "3"]) == 1
