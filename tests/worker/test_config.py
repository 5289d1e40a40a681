"""A worker's config: refusals by flag, and that the engine reads the front's output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from effuse.worker.config import (
    BothConfig,
    DecodeConfig,
    PrefillConfig,
    WorkerConfig,
    to_json,
)
from effuse.worker.engine_process import read_config

NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"page_size": 0}, "--page-size: expected 1 or more, got 0"),
        ({"num_pages": -1}, "--num-pages: expected 1 to 16777216, got -1"),
        ({"num_pages": 1 << 25}, "--num-pages: expected 1 to 16777216, got 33554432"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_model_len": 1}, "--max-model-len: expected 2 or more, got 1"),
        ({"block_size": 0}, "--block-size: expected 1 to 2147483647, got 0"),
        ({"block_size": 1 << 40}, "--block-size: expected 1 to 2147483647, got 1099511627776"),
        ({"port": -1}, "--port: expected 0 to 65535, got -1"),
        ({"redis_url": "r:6379"}, "--redis-url: expected redis://host:port/db, got 'r:6379'"),
        (
            {"gpu_memory_utilization": 0.0},
            r"--gpu-memory-utilization: expected a share in \(0, 1\]",
        ),
        ({"gpu_memory_utilization": NAN}, "--gpu-memory-utilization"),
        ({"kv_offloading_size": -1.0}, "--kv-offloading-size: expected 0 or more GiB, got -1"),
        ({"kv_offloading_dir_size": NAN}, "--kv-offloading-dir-size: expected 0 or more GiB"),
        (
            {
                "kv_offloading_size": 1.0,
                "kv_offloading_dir": Path("/tmp"),
                "kv_offloading_dir_size": 0.0,
            },
            "--kv-offloading-dir-size: expected more than 0 GiB",
        ),
        (
            {"kv_offloading_dir": Path("/tmp")},
            "--kv-offloading-dir: expected --kv-offloading-size with it, because",
        ),
        (
            {"kv_offloading_size": 1.0, "enable_prefix_caching": False},
            "--kv-offloading-size: expected --enable-prefix-caching with it",
        ),
        *(
            (
                {"kv_offloading_size": 1.0, "nnodes": 2, "tensor_parallel_size": 2, **store},
                "--kv-.*: expected --nnodes 1 with it, because ranks share .* memory, got 2",
            )
            for store in ({"kv_offloading_dir": Path("/tmp")}, {"kv_pool": "lmcache://[::1]:1/a"})
        ),
        ({"kv_pool": "mooncake://localhost:1"}, "--kv-pool: expected --kv-offloading-size with it"),
        *(
            ({"kv_offloading_size": 1.0, "kv_pool": url}, "--kv-pool: expected mooncake://host:")
            for url in (
                "redis://localhost:1/a",
                "mooncake://localhost/a",
                "mooncake://localhost:1/a/b",
                "mooncake://localhost:99999/a",
                "mooncake://user@localhost:1/a",
                "mooncake://:secret@localhost:1/a",
                "mooncake://localhost:1/a?protocol=udp",
                "mooncake://localhost:1/a?memory=1",
                "lmcache://localhost:1/a?protocol=tcp",
            )
        ),
        (
            {"kv_offloading_size": 1.0, "kv_pool": "mooncake://10.0.0.1:1/a"},
            "--kv-pool: .*plain text.*--allow-plaintext pages",
        ),
        ({"drain_s": -1.0}, "--drain-s: expected seconds above 0, got -1"),
        ({"hang_timeout_s": float("inf")}, "--hang-timeout-s: expected seconds above 0, got inf"),
        ({"hang_timeout_s": 0.4}, "--hang-timeout-s: expected 1 s or more, because .* got 0.4"),
        (
            {"attention": "flex", "kv_layout": "distinct"},
            "--attention flex: expected --kv-layout unified with it, got distinct",
        ),
        (
            {"attention": "flex", "batch_invariant": True},
            "--batch-invariant: expected --attention triton with it, got flex",
        ),
        ({"fleet": "a}b"}, "fleet 'a}b' is not a valid name"),
        ({"worker_id": ""}, "worker id '' is not a valid name"),
        ({"adapter": Path("/nowhere")}, "--adapter: expected a directory, got '/nowhere'"),
    ],
)
def test_bad_values_name_their_flag(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WorkerConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Dream 7B", "", "../m", "_m", "a//b"])
def test_a_name_that_no_client_may_ask_for_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--served-model-name: expected 1 to 256 characters of"):
        WorkerConfig(served_model_name=name)
    assert WorkerConfig(served_model_name="Dream-org/Dream-7B").served_model_name


def test_roles_check_their_own() -> None:
    with pytest.raises(ValueError, match="--handoff-lease-s"):
        DecodeConfig(handoff_lease_s=0.0)
    with pytest.raises(ValueError, match="expected at most 3600 seconds, got 7200"):
        DecodeConfig(handoff_lease_s=7200.0)  # every prefill worker would refuse its reservations
    with pytest.raises(ValueError, match="--reservation-s"):
        PrefillConfig(reservation_s=NAN)
    for gbps in (-1.0, NAN, float("inf")):
        with pytest.raises(ValueError, match="--min-handoff-gbps: expected 0 or more GB/s"):
            PrefillConfig(min_handoff_gbps=gbps)
    with pytest.raises(ValueError, match="--page-size"):
        DecodeConfig(page_size=0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "--decode-context-parallel-size: expected a divisor of --tensor-parallel-size 1, got"),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3, got 2"),
        (
            {"tensor_parallel_size": 2, "attention": "flex"},
            "-size 2: expected --attention triton with it, because flex returns no log-sum-exp",
        ),
        ({"tensor_parallel_size": 2, "batch_invariant": True}, "expected no --batch-invariant"),
        (
            {"tensor_parallel_size": 2, "cp_kv_cache_interleave_size": 1},
            "--cp-kv-cache-interleave-size: expected --page-size 16, because .*, got 1",
        ),
        *(
            (
                {"tensor_parallel_size": 2, "kv_offloading_size": 1.0, **store},
                "--decode-context-parallel-size 2: expected no --kv-(pool|off.*-dir) with it",
            )
            for store in ({"kv_offloading_dir": Path("/tmp")}, {"kv_pool": "lmcache://[::1]:1/a"})
        ),
    ],
)
def test_a_context_that_cannot_be_cut_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DecodeConfig(decode_context_parallel_size=2, **changes)  # type: ignore[arg-type]


def test_decode_workers_cut_the_context_of_their_devices() -> None:
    config = DecodeConfig(
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        page_size=8,
        cp_kv_cache_interleave_size=8,
    )
    assert (config.context_degree, config.num_ranks) == (2, 4)
    prefill = PrefillConfig(tensor_parallel_size=4)
    assert (prefill.context_degree, prefill.num_ranks, prefill.cuts_rows) == (1, 4, False)
    with pytest.raises(ValueError, match=r"^--decode.*: expected 1 for a worker that both"):
        BothConfig(tensor_parallel_size=2, decode_context_parallel_size=2)


def test_prefill_workers_cut_prompts_beside_their_weights(tmp_path: Path) -> None:
    config = PrefillConfig(tensor_parallel_size=2, prefill_context_parallel_size=4)
    assert (config.context_degree, config.num_ranks, config.cuts_rows) == (4, 8, True)
    offloading = {"kv_offloading_size": 1.0, "kv_offloading_dir": tmp_path}
    for changes, told in (
        ({"prefill_context_parallel_size": 65}, "expected 1 to 64, got 65"),
        ({"tensor_parallel_size": 33}, "at most 64 devices, got 2 times .*-size 33"),
        ({"attention": "flex"}, "-size 2: expected --attention triton with it, because"),
        ({"kv_layout": "distinct"}, "expected --kv-layout unified with it"),
        ({"batch_invariant": True}, "expected no --batch-invariant with it"),
        (offloading, "expected no --kv-offloading-dir with it"),
    ):
        given: dict[str, object] = {"prefill_context_parallel_size": 2, **changes}
        with pytest.raises(ValueError, match=told):
            PrefillConfig(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^--prefill.*: expected 1 for a worker that both"):
        BothConfig(prefill_context_parallel_size=2)


def test_stages_multiply_the_devices(tmp_path: Path) -> None:
    for kind in (PrefillConfig, DecodeConfig, BothConfig):
        config = kind(pipeline_parallel_size=3, tensor_parallel_size=2, expert_parallel=True)
        assert config.num_ranks == 6
    assert DecodeConfig().runs_graphs and not DecodeConfig(attention="flex").runs_graphs
    for changes, told in (
        ({"pipeline_parallel_size": 65}, "expected 1 to 64, got 65"),
        ({"tensor_parallel_size": 33}, "at most 64 devices, got 2 times .*-size 33"),
        ({"attention": "flex"}, "-size 2: expected --attention triton with it, got flex"),
        ({"kv_layout": "distinct"}, "expected --kv-layout unified with it"),
        ({"batch_invariant": True}, "expected no --batch-invariant with it"),
        ({"kv_offloading_size": 1.0}, "expected no --kv-offloading-size with it"),
        ({"data_parallel_size": 2}, "expected --data-parallel-size 1 with it, got 2"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "expected --decode-context-parallel-size 1 with it",
        ),
    ):
        given: dict[str, object] = {"pipeline_parallel_size": 2, **changes}
        with pytest.raises(ValueError, match=told):
            DecodeConfig(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected --prefill-context-parallel-size 1 with it"):
        PrefillConfig(pipeline_parallel_size=2, prefill_context_parallel_size=2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nnodes": 0}, "--nnodes: expected 1 to 64, got 0"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank: expected 0 to 0, got 1"),
        ({"node_rank": 2}, "--node-rank: expected 0 to 1, got 2"),
        ({"master_port": 0}, "--master-port: expected 1 to 65535, got 0"),
        ({"master_addr": None}, "--nnodes 2: expected --master-addr with it"),
        ({"tensor_parallel_size": 3}, "--nnodes 2: expected a divisor of the worker's 3 devices"),
        ({"tensor_parallel_size": 1}, "--nnodes 2: expected a divisor of the worker's 1 devices"),
        ({"master_addr": "10.0.0.1"}, "--host: expected an address that --master-addr 10.0.0.1"),
        (
            {"host": "0.0.0.0", "master_addr": "10.0.0.1", "fleet_cert": Path("x")},
            "--fleet-cert: expected",
        ),
    ],
)
def test_hosts_that_cannot_share_a_worker_are_refused(
    changes: dict[str, object], told: str
) -> None:
    given = {"nnodes": 2, "master_addr": "127.0.0.1", "tensor_parallel_size": 2, **changes}
    with pytest.raises(ValueError, match=told):
        DecodeConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allows", "has_secret", "told"),
    [
        ("none", True, "tensors would travel in plain text, or --allow-plaintext pages"),
        ("pages", False, "commands would travel in plain text, or --allow-plaintext all"),
        ("pages", True, ""),
    ],
)
def test_between_hosts_tensors_are_plain_text_and_commands_only_without_a_secret(
    tmp_path: Path, allows: str, has_secret: bool, told: str
) -> None:
    files = {name: tmp_path / name for name in ("fleet_cert", "fleet_key", "fleet_ca", "secret")}
    for path in files.values():
        path.write_text("x" * 32)
    secret = files.pop("secret")
    given: dict[str, object] = {
        "host": "0.0.0.0",
        "metrics": False,
        "nnodes": 2,
        "master_addr": "leader",
        "tensor_parallel_size": 4,
        "connector": "zmq",
        "encrypt_pages": True,
        **files,
        "allow_plaintext": allows,
        "fleet_secret": secret if has_secret else None,
    }
    if told:
        with pytest.raises(ValueError, match=told):
            DecodeConfig(**given)  # type: ignore[arg-type]
    else:
        assert DecodeConfig(**given).ranks_per_node == 2  # type: ignore[arg-type]


def test_the_engine_reads_what_the_front_wrote(tmp_path: Path) -> None:
    config = DecodeConfig(model=tmp_path, num_pages=7, enforce_eager=True, handoff_lease_s=3.5)
    assert read_config(msgspec.Raw(to_json(config)), DecodeConfig) == config


@pytest.mark.parametrize("kind", [PrefillConfig, DecodeConfig, BothConfig])
@pytest.mark.parametrize("name", ["ready_file", "fleet_secret", "model", "advertise_host"])
def test_the_engine_is_told_no_path_that_is_not_utf8(
    tmp_path: Path, kind: type[WorkerConfig], name: str
) -> None:
    odd = tmp_path / "odd-\udcff"  # a byte of a file's name that is no character
    odd.mkdir()
    value = str(odd) if name == "advertise_host" else odd
    told = rf"^--{name.replace('_', '-')}: expected UTF-8, got '.*odd-\\udcff'$"
    with pytest.raises(ValueError, match=told):
        kind(**{name: value})  # type: ignore[arg-type]


def test_the_engine_refuses_a_config_of_another_form() -> None:
    fields = json.loads(to_json(DecodeConfig())) | {"page_size": "many"}
    with pytest.raises(msgspec.ValidationError, match="page_size"):
        read_config(msgspec.Raw(json.dumps(fields).encode()), DecodeConfig)


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_a_wildcard_address_is_never_advertised(host: str, is_told: bool) -> None:
    config = WorkerConfig(host=host, allow_plaintext="all")
    assert (config.reachable_host() == host) is is_told
    assert replace(config, advertise_host="pod-7").reachable_host() == "pod-7"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "[2001:db8::1]", "worker-7"])
def test_plain_text_beyond_loopback_is_meant_or_refused(host: str) -> None:
    with pytest.raises(
        ValueError, match="--host: expected a loopback address, because calls would travel in"
    ):
        WorkerConfig(host=host)
    with pytest.raises(ValueError, match="or --allow-plaintext all"):
        WorkerConfig(host=host, allow_plaintext="pages")
    assert WorkerConfig(host=host, allow_plaintext="all").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    assert WorkerConfig(host=host, metrics_host=host).metrics_host == host
