"""For every test: one torch thread, the checkout off the import path, and skips only without a GPU,
without another project's client or without the right to make networks.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from slowness import patient

# `python -m pytest` puts the checkout first, whose folders would shadow packages of the same name.
_ROOT = Path(__file__).parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONSAFEPATH", "1")

gc.disable()  # until all tests are collected, which makes a million objects that stay

# The parent of the tests may ignore both (nohup, a job in the background). Child processes would
# inherit that, but not a handler.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# The extra that these are about is no part of every installation for tests.
collect_ignore = [] if find_spec("opentelemetry") else ["e2e/test_traces.py"]
_MARKS = ("gpu", "client", "chart", "network", "rdma", "mooncake")
# The files that take longest come first, so that at the end no core is idle because one of them
# still runs. Those that wait for processes alternate with those that compute, for the same reason.
LONGEST = (
    "kernels/test_interpreter.py",
    "e2e/test_degrees.py",
    "e2e/test_equality.py",
    "simulation/test_day.py",
    "e2e/test_roles.py",
    "worker/test_ranks.py",
    "cli/test_up_process.py",
    "decode_worker/test_engine_oracle.py",
    "e2e/test_hosts.py",
    "e2e/test_rolling.py",
    "e2e/test_absence.py",
    "decode_worker/test_unit_cache.py",
    "e2e/test_pool_degrees.py",
    "k8s/test_two_fleets.py",
    "e2e/test_detection.py",
    "router/test_steering.py",
    "e2e/test_two_routers.py",
    "e2e/test_chats.py",
    "test_package.py",
    "worker/test_front_process.py",
    "worker/test_pool_of_ranks.py",
    "decode_worker/test_engine_storm.py",
    "e2e/test_cancel_storm.py",
    "gpu/test_fleets.py",
    "decode_worker/test_canvas.py",
    "worker/test_front.py",
    "e2e/test_links.py",
    "k8s/test_manifests.py",
    "telemetry/test_output.py",
    "e2e/test_redis_groups.py",
    "k8s/test_chart.py",
    "e2e/test_lost_engines.py",
    "e2e/test_kv_mode.py",
    "decode_worker/test_engine_handoff.py",
    "kvtransfer/test_fence.py",
    "protos/test_keepalive.py",
    "benchmarks/test_gpu_fleet.py",
    "kvtransfer/test_exit_status.py",
    "e2e/test_canvas.py",
    "kernels/test_step_advance.py",
    "e2e/test_poison_request.py",
    "cli/test_demo.py",
    "decode_worker/test_device_executor.py",
    "client/test_client.py",
    "e2e/test_published_blocks.py",
    "simulation/test_search.py",
    "prefill_worker/test_long_forwards.py",
    "cli/test_fleet_gpus.py",
    "decode_worker/test_shared_prompts.py",
    "e2e/test_waiting.py",
    "e2e/test_sharing.py",
    "kvtransfer/test_ranks.py",
    "cli/test_d2f_repo.py",
    "kernels/test_device_code.py",
    "e2e/test_bundled.py",
    "decode_worker/test_room.py",
    "e2e/test_own_prompts.py",
    "decode_worker/test_llada21.py",
    "e2e/test_overlapping.py",
    "benchmarks/test_gpu_step.py",
    "chaos/test_injector.py",
    "decode_worker/test_offloading.py",
    "e2e/test_metrics.py",
    "decode_worker/test_llada2.py",
    "e2e/test_listening.py",
    "decode_worker/test_pipeline.py",
    "client/test_retries.py",
    "simulation/test_simulation.py",
    "offline/test_llm.py",
    "models/test_prompt_graphs.py",
    "e2e/test_answers.py",
    "fuzz/test_fuzz.py",
    "load/test_up.py",
    "training/test_train.py",
    "e2e/test_sealed.py",
    "models/test_load_memory.py",
    "e2e/test_bad_input.py",
    "kernels/test_attention_flex.py",
)
_TESTS = Path(__file__).parent
_LOG_LINES = 30
_RULE = f"only tests marked {', '.join(_MARKS)} may be skipped"


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory for the logs of tests' fleets: not among those of the user."""
    home = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(home)
    return home


@pytest.fixture(scope="session", autouse=True)
def _logs_of_fleets() -> None:
    """An error under a running fleet comes with the ends of its logs, which go with the test."""
    from effuse.cli.fleet import Fleet

    leave = Fleet.__exit__

    def leave_with_logs(fleet: Fleet, *exc: object) -> None:
        if exc[0] is not None:
            for log in sorted(fleet.log_dir.glob("*.log")):
                last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                print(f"--- {log.name}", *last, sep="\n")
        leave(fleet, *exc)

    Fleet.__exit__ = leave_with_logs  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests for a GPU if there is none, gives tests longer on a slow machine, and begins with
    the longest files."""
    ranks = {_TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        item.add_marker(pytest.mark.timeout(patient(_limit_of(item))), append=False)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each full collection would search all that was collected here: up to a second
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    # At the interpreter's end libraries would report that frozen objects were leaked; before it
    # pytest collects ten times.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Nothing but tests with these marks may be skipped."""
    report = yield
    may_be = any(item.get_closest_marker(name) for name in _MARKS)
    if report.skipped and not may_be:
        report.outcome, report.longrepr = "failed", f"{_RULE}: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module may not be skipped either."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{_RULE}: {report.longrepr}"
    return report


def _limit_of(item: pytest.Item) -> float:
    """Seconds that a test may take on quiet cores: its own limit, or the common one."""
    mark = item.get_closest_marker("timeout")
    own: float = mark.args[0] if mark else item.config.getoption("timeout")
    return own if own is not None else float(item.config.getini("timeout"))


def _has_gpu() -> bool:
    import torch  # only if a collected test needs it: some tests assert that it is not imported

    return torch.cuda.is_available()
