"""What a worker's front and its engine tell each other, and what an engine core is.

Tagged msgspec structs that mirror worker.proto; plain data, no I/O. Every message but those of the
process itself names the attempt that it is about.

After `Abort` an engine says nothing more of the attempt than `AbortDone`; after `Finished`,
`Failed` and `PromptPushed` it says nothing more at all. A decode with a writer that ends before
`Verified`, in whatever way, keeps its pages in quarantine until `WriterGone`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec

from effuse.config.decoding import DecodeSettings, Sampling, Stopping
from effuse.kvtransfer.messages import AttemptId, Reservation
from effuse.placement.records import Load, ModelInfo

# What an engine does. All but serving it announces, since for long it will show no other sign.
Phase = Literal["loading", "capturing", "compiling", "serving"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What the model thought of one written token, as `kernels.sampling_logprobs` has it."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class BlockState(msgspec.Struct, frozen=True, array_like=True):
    """One block in flight."""

    token_ids: tuple[int, ...]  # the mask id where none is written
    masks: bytes  # one bit a position, lowest bit first: set where a mask is left
    full: bool  # the block must progress every step
    denoise_count: int  # forwards that have denoised it
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # by position, where asked for; None: no token


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known to go on exactly where another attempt was."""

    committed_token_ids: tuple[int, ...]
    frontier: tuple[BlockState, ...]


# Front to engine.


class StartPrefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Computes a prompt at once; the push waits for the reservation."""

    attempt: AttemptId
    prompt_token_ids: tuple[int, ...]
    cache_salt: str = ""  # prompts of others share no KV with it


class PushTo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Tells a prefill where its pages go. Its attempt is the reservation's."""

    reservation: Reservation


class StartRehearsal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks a decode engine for free pages that a prefill worker writes once, to measure the way.

    Answered by Reserved, then Verified, which is the end: the pages are free again.
    """

    attempt: AttemptId
    writer: str  # incarnation of the prefill worker
    most_pages: int


class PushRehearsal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Has a prefill engine push as many free pages as are reserved; answered by PromptPushed."""

    reservation: Reservation
    in_groups: bool = False  # layers leave one group after the other, as a prompt's do


class StartDecode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks for one answer. All settings are resolved and within their bounds."""

    attempt: AttemptId
    prompt_token_ids: tuple[int, ...]
    stopping: Stopping
    sampling: Sampling
    settings: DecodeSettings
    writer: str | None  # incarnation of the prefill worker that will push; None prefills here
    drafts: bool = False
    num_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = (
        None  # likeliest ids to send with log-probabilities; None sends none
    )
    resume: Resume | None = None
    group: str = ""  # whose members share the KV of an equal prompt; empty: none


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ends an attempt, known or not, and refuses it from now on; answered by AbortDone."""

    attempt: AttemptId
    reason: str


class WriterGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Nobody writes into this transfer's pages any more. They may be reused once nothing that was
    under way to this process can land."""

    transfer_id: str
    has_drained: bool  # the writer's engine said that all it had posted is over; else it is gone


class ReceiverGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine of a decode worker has ended: nothing is pushed to this life of it any more."""

    incarnation: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine process; handled by the process, never by its core."""


ToEngine = (
    StartPrefill
    | PushTo
    | StartDecode
    | StartRehearsal
    | PushRehearsal
    | Abort
    | WriterGone
    | ReceiverGone
    | Shutdown
)

# Engine to front.

FailureCode = Literal[
    "INVALID_ARGUMENT",  # this request can never work here
    "ALREADY_EXISTS",  # the attempt is running
    "FAILED_PRECONDITION",  # fingerprint or incarnation differ
    "RESOURCE_EXHAUSTED",  # no room now
    "ABORTED",  # the attempt was ended before
    "DEADLINE_EXCEEDED",  # the handoff's lease ran out
    "UNAVAILABLE",  # the peer or the connector failed
    "DATA_LOSS",  # the digest or the coverage is wrong
    "INTERNAL",  # our own mistake
]


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Weights are loaded and a forward has run: only heartbeats come before it."""

    model: ModelInfo
    fingerprint: tuple[tuple[str, str], ...]
    page_size: int
    total_pages: int
    # On which the process listens, and answers nobody, for as long as it lives: where nobody does,
    # nothing of this engine writes any more.
    engine_port: int = 0
    connector: str = ""  # by which its pages move


class StartupFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine could not start; the last message of such a process."""

    message: str
    permanent: bool  # the configuration or the checkpoint is at fault: starting again will not help


class Reserved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pages are held. First event of a decode; without a writer it needs no address to write to."""

    reservation: Reservation


class Verified(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The prompt's KV is complete and checked; no writer is left."""

    attempt: AttemptId
    bytes: int
    pages: int
    handoff_s: float  # since the last page was final and the reservation known, checks included


class Committed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Final tokens, append-only."""

    attempt: AttemptId
    token_offset: int  # position of the first one in the answer
    token_ids: tuple[int, ...]  # a stop id is left out
    forward_passes: int  # so far
    frontier: tuple[BlockState, ...]  # blocks in flight after this commit
    end_token_id: int | None = None  # the stop id behind them, where it ends the answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, where asked for


class Draft(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A block has begun or changed. Sent only where drafts were asked for."""

    attempt: AttemptId
    token_offset: (
        int  # of the block's first token in the answer; negative before a ragged prompt's end
    )
    block: BlockState


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The end of an answer."""

    attempt: AttemptId
    stopped: bool  # a stop id ended it, not its length
    num_tokens: int
    forward_passes: int
    preemptions: int


class PrefillDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A prompt is computed."""

    attempt: AttemptId
    queue_s: float
    compute_s: float
    cached_tokens: int = 0  # whose KV was there


class PromptPushed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A prompt's pages have arrived: the end of a prefill."""

    attempt: AttemptId
    pages: int
    bytes: int  # boundary state left out
    push_s: float  # since the last page was final and the reservation known, to the last answer
    transport: str = ""  # what moved the bytes, as `kvtransfer.connector.Route` names it
    is_fallback: bool = False  # pages of GPUs took TCP or the host, which nobody asked for
    moved_s: float = 0.0  # since the first page left, to the last answer


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The end of an attempt that did not work."""

    attempt: AttemptId
    code: FailureCode
    message: str  # for the caller: expected and actual, no internals
    retryable: bool  # another attempt may work
    retry_after_s: float | None = None
    field: str | None = None  # the fingerprint or request field at fault


class AbortDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An abort has taken effect: nothing of the attempt reads or writes KV memory here."""

    attempt: AttemptId
    was_running: bool


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A sign of life, from the thread that does the work. The only message before `Ready`."""

    loops: int  # turns of the engine's loop so far
    marks: int = 0  # parts of steps done so far, such as layers of forwards
    phase: Phase = "serving"
    load: Load
    dropped_lines: int = 0  # of its output, that nobody read, since the last beat


AttemptEvent = (
    Verified | Committed | Draft | Finished | PrefillDone | PromptPushed | Failed | AbortDone
)
CoreEvent = Reserved | AttemptEvent  # what a core emits; the process adds the rest
ToFront = Ready | StartupFailed | Heartbeat | CoreEvent


class EngineCore(Protocol):
    """What an engine process drives; used from one thread only."""

    def handle(self, message: ToEngine) -> None:
        """Takes one message. Never blocks; a bad request emits `Failed` and raises nothing."""

    def step(self) -> bool:
        """Runs one iteration; False if there was nothing to do, or nothing yet."""

    def is_working(self) -> bool:
        """Whether a device still runs what was launched on it: its end wakes nobody."""

    def outbox(self) -> Sequence[CoreEvent]:
        """Returns what is to be said since the last call, in order."""

    def load(self) -> Load:
        """Returns the load; cheap, called many times a second."""

    def close(self) -> None:
        """Stops the connector and frees the device."""
