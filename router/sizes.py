"""How large a request may be: its most tokens, pages and rows on one worker, and a worker's room.

Pure. `validation.py` refuses a request for which no worker has room, `policy.py` places the others
on workers that have it. The checks of the workers are in `decode_worker/scheduler.py` and
`prefill_worker/prompts.py`."""

from collections.abc import Collection, Mapping
from operator import le
from types import MappingProxyType
from typing import Final, NamedTuple

from effuse.config.decoding import DecodeSettings
from effuse.placement.records import Kind, ModelInfo, WorkerRecord

AT_ONCE: Final = "which this fleet's workers compute at once (--max-num-batched-tokens)"
_BOUNDLESS: Final = 1 << 63


class Size(NamedTuple):
    """The most that one request takes of a worker, or a worker's room for one request."""

    tokens: int = 0  # of prompt and answer
    cached: int = 0  # tokens with KV in pages
    rows: int = 0  # of one forward


class Sizes(NamedTuple):
    """The sizes of one request on its workers."""

    prefill: Size = Size()
    decode: Size = Size()

    def fit(self, kind: Kind, record: WorkerRecord) -> bool:
        """Whether a worker has room for its part of this kind of work."""
        size, has = self.prefill if kind == "prefill" else self.decode, record.capacity
        return (  # written out: it takes a third of the time, and each choice asks thirty workers
            size.tokens <= record.model.max_model_len
            and size.cached <= has.total_pages // has.replicas * has.page_size
            and size.rows <= has.max_num_batched_tokens // has.replicas
        )


NO_SIZES: Final = Sizes()

Rooms = Mapping[Kind, Collection[Size]]
"""The rooms of workers, by the kinds of work that a request needs."""

NO_ROOMS: Final[Rooms] = MappingProxyType({})


def room_of(record: WorkerRecord) -> Size:
    """A worker's room for one request, which one replica runs."""
    has = record.capacity
    pages, rows = has.total_pages // has.replicas, has.max_num_batched_tokens // has.replicas
    return Size(record.model.max_model_len, pages * has.page_size, rows)


def round_up(size: Size, rooms: Collection[Size]) -> Size:
    """The largest one for which the same workers have room. So needs that differ in nothing else
    are equal, and the fleet is searched once for all of them."""
    enough = [room for room in rooms if all(map(le, size, room))]
    return Size(*map(min, zip(*enough, strict=True))) if enough else size


def sizes_of(prompt_len: int, max_tokens: int, model: ModelInfo, settings: DecodeSettings) -> Sizes:
    """The sizes of a request. The last block is never stored."""
    end, (origin, length) = prompt_len + max_tokens, _grid(prompt_len, model, settings)
    cached = origin + (end - 1 - origin) // length * length
    if settings.is_canvas:
        rows = end * (2 if settings.cfg_scale > 0 else 1)
        return Sizes(decode=Size(end, 0 if settings.cache == "none" else cached, rows))
    prompt = origin + (prompt_len - origin) // length * length
    num_blocks = (cached - prompt) // length + 1
    # All blocks of a full window may settle in one step, and are stored with one new block.
    rows = max(origin, min(settings.most_active + 1, num_blocks) * length)
    return Sizes(Size(prompt_len + 1, prompt, origin), Size(end, cached, rows))


def room_for(
    prompt_len: int, model: ModelInfo, settings: DecodeSettings, rooms: Rooms
) -> tuple[tuple[int, str], dict[Size, tuple[int, str]]]:
    """Tokens of the longest prompt that workers can take, and of the longest answer to one of
    `prompt_len` tokens by the room of decode workers that can take it; each with the bound in
    words. A kind of worker that is not known has the model's own length."""
    rooms = {"decode": [Size(model.max_model_len, _BOUNDLESS, _BOUNDLESS)], **rooms}
    prompts = {
        kind: {room: _most_prompt(room, model, settings) for room in each}
        for kind, each in rooms.items()
    }
    answers = {
        room: _most_answer(room, prompt_len, model, settings)
        for room, (most, _) in prompts["decode"].items()
        if most >= prompt_len
    }
    return min(max(each.values()) for each in prompts.values()), answers


def _most_prompt(room: Size, model: ModelInfo, settings: DecodeSettings) -> tuple[int, str]:
    """Tokens of the longest prompt for which a worker has room, and the bound in words."""
    is_whole, length = model.prompt_attention == "bidirectional", model.block_size
    found = [(room.tokens - 1, "so that one can be generated")]
    if not (settings.is_canvas and settings.cache == "none"):
        most = room.cached if is_whole else room.cached // length * length + length - 1
        found.append((most, "for which this fleet's workers have pages (--num-pages)"))
    if is_whole and not settings.is_canvas:
        found.append((room.rows, AT_ONCE))
    return min(found)


def _most_answer(
    room: Size, prompt_len: int, model: ModelInfo, settings: DecodeSettings
) -> tuple[int, str]:
    """Tokens of the longest answer to such a prompt for which a worker has room, and the bound in
    words."""
    origin, length = _grid(prompt_len, model, settings)
    found = [(room.tokens - prompt_len, f"the model accepts {room.tokens} in all")]
    if not (settings.is_canvas and settings.cache == "none"):
        most = origin + ((room.cached - origin) // length + 1) * length - prompt_len
        pages = f"have pages for {room.cached} tokens and the last block (--num-pages)"
        found.append((most, f"this fleet's workers {pages}"))
    return min(found)


def _grid(prompt_len: int, model: ModelInfo, settings: DecodeSettings) -> tuple[int, int]:
    """The begin of the first block behind a whole prompt, or of all blocks, and their length."""
    is_whole = model.prompt_attention == "bidirectional"
    length = settings.block_length if settings.is_canvas else model.block_size
    return prompt_len if is_whole else 0, length
