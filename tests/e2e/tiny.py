"""A tiny random checkpoint and fleets that serve it, shared by the end-to-end tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints import MASK_TOKEN_ID, VOCAB_SIZE, Architecture, TinySizes, write_tiny_checkpoint
from slowness import patient

from effuse.cli.commands import FleetConfig
from effuse.cli.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """Numbers of the checkpoint and of the flags its fleets are started with."""

    block_size: int = 8
    page_size: int = 16
    max_model_len: int = 256
    mask_token_id: int = MASK_TOKEN_ID
    vocab_size: int = VOCAB_SIZE
    plain_ids: Sequence[int] = range(250)

    @property
    def page_bytes(self) -> int:
        sizes = TinySizes()
        token = sizes.num_layers * 2 * sizes.num_kv_heads * sizes.head_dim * 4
        return token * self.page_size


TINY = Tiny()


def tiny_checkpoint(path: Path, architecture: Architecture) -> Path:
    return write_tiny_checkpoint(
        path, architecture, seed=11, head_scale=8.0, gain=0.6, block_size=TINY.block_size
    )


@contextlib.contextmanager
def tiny_fleet(
    architecture: Architecture,
    *,
    connector: str,
    prefill: int = 1,
    decode: int = 1,
    workers: int = 0,
    routers: int = 1,
    num_pages: int = 512,
    worker_flags: tuple[str, ...] = (),
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
) -> Iterator[Fleet]:
    """A running fleet; its checkpoint is at `fleet.config.model`."""
    with (
        tempfile.TemporaryDirectory(prefix="effuse-tiny-") as home,
        fleet_of(
            tiny_checkpoint(Path(home) / architecture, architecture),
            connector=connector,
            prefill=prefill,
            decode=decode,
            workers=workers,
            routers=routers,
            num_pages=num_pages,
            worker_flags=worker_flags,
            prefill_flags=prefill_flags,
            decode_flags=decode_flags,
            router_flags=router_flags,
        ) as fleet,
    ):
        yield fleet


@contextlib.contextmanager
def fleet_of(
    model: Path,
    *,
    connector: str,
    prefill: int = 1,
    decode: int = 1,
    workers: int = 0,
    routers: int = 1,
    num_pages: int = 512,
    worker_flags: tuple[str, ...] = (),
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
) -> Iterator[Fleet]:
    """A running fleet that serves the checkpoint at `model`."""
    config = FleetConfig(
        prefill=prefill,
        decode=decode,
        workers=workers,
        routers=routers,
        connector=connector,
        model=model,
        worker_flags=(
            *("--device", "cpu", "--page-size", str(TINY.page_size)),
            *("--num-pages", str(num_pages), "--max-model-len", str(TINY.max_model_len)),
            *("--hang-timeout-s", str(patient(30.0))),  # tests let engines stand still
            *worker_flags,
        ),
        prefill_flags=prefill_flags,
        decode_flags=decode_flags,
        # never a local prefill
        router_flags=(*(("--prefill", "remote") if prefill else ()), *router_flags),
        has_secret=False,  # tests ask workers, too
    )
    with Fleet(config) as fleet:
        yield fleet
