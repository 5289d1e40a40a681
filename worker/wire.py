"""Between worker.proto and the messages of the engine's socket: checks of form, field by field.

Raises `InvalidRequest` that names the field with the expected and the found value. The engine
decides whether a request fits the model and the pool.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from effuse.config.decoding import Bounds, DecodeSettings, Sampling, SettingError, Stopping
from effuse.kvtransfer.messages import (
    AttemptId,
    Field,
    KVPart,
    MalformedMessage,
    PageRef,
    ReceiverAddress,
    Reservation,
    Shard,
    check_reservation,
)
from effuse.protos.channels import Filled, filled
from effuse.protos.errors import Bug, InvalidRequest
from effuse.v1 import generation_pb2
from effuse.v1 import worker_pb2 as pb
from effuse.worker.messages import BlockState, CoreEvent, Reserved, Resume, TokenLogprobs

_MOST_ID_CHARS = 128
_MOST_ADDRESS_CHARS = 300
_OF_ADDRESS: Final = [name for name in ReceiverAddress.__struct_fields__ if name != "connector"]


def attempt_id(message: pb.AttemptId) -> AttemptId:
    _check_id("attempt.request_id", message.request_id)
    _check_id("attempt.transfer_id", message.transfer_id)
    if message.attempt < 1:
        raise _wrong("attempt.attempt", "1 or more", message.attempt)
    return AttemptId(message.request_id, message.attempt, message.transfer_id)


def writer(message: pb.WorkerRef, field: str) -> pb.WorkerRef:
    """The prefill worker that pushes, with a checked life and address; `field` has it."""
    host, colon, port = message.address.rpartition(":")
    is_short = len(message.address) <= _MOST_ADDRESS_CHARS
    if not (is_short and host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise _wrong(f"{field}.address", "host:port", repr(message.address[:_MOST_ID_CHARS]))
    _check_id(f"{field}.incarnation", message.incarnation)
    if not 0 < message.engine_port < 65536:
        raise _wrong(f"{field}.engine_port", "1 to 65535", message.engine_port)
    return message


def prompt(token_ids: Sequence[int]) -> tuple[int, ...]:
    if not token_ids:
        raise _wrong("prompt_token_ids", "at least 1 token", 0)
    return tuple(token_ids)


def reservation(message: pb.Reservation) -> Reservation:
    attempt = attempt_id(message.attempt)
    try:
        return check_reservation(_reservation(message, attempt))
    except MalformedMessage as error:
        raise InvalidRequest.of("reservation", str(error)) from error


def _reservation(message: pb.Reservation, attempt: AttemptId) -> Reservation:
    return Reservation(
        attempt=attempt,
        incarnation=message.incarnation,
        shards=tuple(_shard(message.connector, shard) for shard in message.shards),
        digest_seed=message.digest_seed,
        num_pool_pages=message.num_pool_pages,
        pages=tuple(PageRef(page.page_id, page.generation) for page in message.pages),
        fingerprint=tuple(Field(field.name, field.value) for field in message.fingerprint),
        lease_s=message.lease_s,
        num_held=message.num_held,
        num_written=message.num_written,
    )


def _shard(connector: str, message: pb.ReceivingShard) -> Shard:
    return Shard(
        address=ReceiverAddress(
            connector=connector, **{name: getattr(message, name) for name in _OF_ADDRESS}
        ),
        part=KVPart(
            *(message.first_head, message.end_head, message.first_group, message.end_group),
            *(message.context_rank, message.context_degree or 1),
        ),
        page_bytes=message.page_bytes,
    )


def response_of(kind: type[Filled], event: CoreEvent) -> Filled:
    """A message of this kind with an engine's event. Raises `Bug` for one that it cannot hold."""
    name = str(event.__struct_config__.tag)
    if name not in kind.DESCRIPTOR.fields_by_name:
        raise Bug(f"an engine sent {type(event).__name__}, which no {kind.__name__} can hold")
    if isinstance(event, Reserved):
        return kind(reservation=reservation_to_proto(event.reservation))
    return kind(**{name: filled(type(getattr(kind(), name)), event)})


def reservation_to_proto(held: Reservation) -> pb.Reservation:
    return filled(pb.Reservation, held, shards=map(_shard_to_proto, held.shards))


def _shard_to_proto(shard: Shard) -> pb.ReceivingShard:
    part = shard.part
    turns = {"context_rank": part.turn, "context_degree": part.turns}
    return filled(pb.ReceivingShard, shard.address, shard, part, **turns)


def stopping(message: pb.DecodeRequest) -> Stopping:
    with _naming(""):
        return Stopping(
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            min_tokens=message.min_tokens,
        )


def sampling(message: pb.DecodeSampling) -> Sampling:
    with _naming("sampling."):
        return Sampling(**_given(message), logit_bias=tuple(sorted(message.logit_bias.items())))


def settings(message: pb.DecodeSettings) -> DecodeSettings:
    """Reads how blocks are denoised. The struct also checks names."""
    with _naming("settings."):
        return DecodeSettings(**_given(message))


def _given(message: pb.DecodeSampling | pb.DecodeSettings) -> dict[str, Any]:
    """Single values by their names, without optional ones that an earlier router does not send."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if not field.is_repeated and (not field.has_presence or message.HasField(field.name))
    }


def resume(message: pb.Resume, block_size: int) -> Resume:
    """Reads the state that another attempt left; every block is `block_size` long."""
    num_bytes = (block_size + 7) // 8
    for index, block in enumerate(message.frontier):
        field = f"resume.frontier[{index}]"
        if len(block.token_ids) != block_size:
            raise _wrong(f"{field}.token_ids", f"{block_size} tokens", len(block.token_ids))
        if len(block.masks) != num_bytes:
            raise _wrong(f"{field}.masks", f"{num_bytes} bytes", len(block.masks))
        if len(block.logprobs) not in (0, block_size):
            raise _wrong(f"{field}.logprobs", f"none or {block_size}", len(block.logprobs))
    return Resume(
        committed_token_ids=tuple(message.committed_token_ids),
        frontier=tuple(
            BlockState(
                tuple(block.token_ids),
                block.masks,
                block.full,
                block.denoise_count,
                tuple(_logprobs(one) for one in block.logprobs),
            )
            for block in message.frontier
        ),
    )


def bounded(message: pb.DecodeRequest, name: str, bounds: Bounds) -> Any:
    """Reads an optional number within its bounds; None if it is not set."""
    if not message.HasField(name):
        return None
    if (value := getattr(message, name)) not in bounds:
        raise _wrong(name, bounds.form, value)
    return value


def label(value: str, field: str) -> str:
    """Reads the name of a group of answers, or the salt of a cache."""
    if len(value) > _MOST_ID_CHARS:
        raise _wrong(field, f"at most {_MOST_ID_CHARS} characters", len(value))
    return value


def _logprobs(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    ids, top = tuple(message.top_token_ids), tuple(message.top_logprobs)
    if len(ids) != len(top):
        raise _wrong("logprobs.top_logprobs", f"{len(ids)} of them", len(top))
    return TokenLogprobs(message.logprob, ids, top)


@contextmanager
def _naming(parent: str) -> Iterator[None]:
    try:
        yield
    except SettingError as error:
        raise InvalidRequest.of(f"{parent}{error.name}", error.description) from error


def _check_id(field: str, value: str) -> None:
    if not 1 <= len(value) <= _MOST_ID_CHARS:
        raise _wrong(field, f"1 to {_MOST_ID_CHARS} characters", len(value))


def _wrong(field: str, expected: str, found: object) -> InvalidRequest:
    return InvalidRequest.of(field, f"expected {expected}, got {found}")
