"""A prefill worker reduced to its essence: computes a prompt's pages and pushes them."""

from __future__ import annotations

import torch
from kvtransfer.loopback import Hub, LoopbackConnector

from decoding.engines import Clock, fingerprint_of, layout_of
from effuse.kvtransfer.connector import FinishPush, PushPages
from effuse.kvtransfer.digest import prompt_digest
from effuse.kvtransfer.layout import Fingerprint, PageMemory
from effuse.kvtransfer.messages import BoundaryState, Reservation
from effuse.models.part import Part
from effuse.models.runner import ModelRunner
from effuse.models.transformer import Transformer
from effuse.worker.messages import StartDecode

SOURCE = "prefill-1"


class Source:
    """Pages of its own, enough for one prompt at a time."""

    def __init__(
        self,
        model: Transformer,
        hub: Hub,
        clock: Clock,
        *,
        page_size: int = 4,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.model = model
        self.layout = layout_of(model, page_size)
        self.memory = PageMemory(self.layout, 64)
        self.connector = LoopbackConnector(
            hub, self.memory, SOURCE, fingerprint or fingerprint_of(model, self.layout), clock
        )
        self.connector.start()
        self._runner = ModelRunner(
            model,
            self.memory.layer_views(),
            page_size=page_size,
            block_size=model.config.block_size,
        )

    def push(self, request: StartDecode, reservation: Reservation) -> None:
        """Computes the prompt and hands it over."""
        boundary = self.compute(request)
        held = reservation.num_held
        pages = tuple(range(held, held + len(reservation.pages)))
        self.connector.send(PushPages(reservation, pages, 0))
        self.connector.send(FinishPush(reservation, lambda: boundary))

    def compute(self, request: StartDecode) -> BoundaryState:
        """The prompt's KV, from page 0 on, and its boundary."""
        prompt = request.prompt_token_ids
        config = self.model.config
        origin = config.block_origin(len(prompt))
        count = origin or len(prompt) // config.block_size * config.block_size
        hidden: torch.Tensor | None = None
        if count:
            (result,) = self._runner.run(
                [
                    Part(
                        token_ids=prompt[:count],
                        start=0,
                        pages=range(self.layout.pages_for(count)),
                        num_stored=count,
                        block_origin=origin,
                        keep_boundary=True,
                    )
                ]
            )
            hidden = result.boundary
            used = count - (self.layout.pages_for(count) - 1) * self.layout.page_size
            self.memory.zero_tail(self.layout.pages_for(count) - 1, used)
        return BoundaryState(
            prompt_len=len(prompt),
            prompt_digest=prompt_digest(prompt),
            tail_token_ids=prompt[count:],
            hidden=None if hidden is None else hidden.numpy().tobytes(),
        )
