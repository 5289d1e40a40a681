"""The models of the fleet: which there are, which one a request means, and ModelService.

Known from what workers announce. A model whose workers are gone stays known, so that asking for it
is UNAVAILABLE and not NOT_FOUND.
"""

from __future__ import annotations

from typing import Final

import grpc.aio

from effuse.placement.records import ModelInfo
from effuse.protos.errors import InvalidRequest, NotFound, Unavailable
from effuse.router.checks import Findings, check_model_name, shown
from effuse.router.fleet import Fleet
from effuse.router.policy import live_workers
from effuse.v1 import generation_pb2, model_pb2, model_pb2_grpc

MOST_MODELS_A_PAGE: Final = 1000
_ALGORITHMS: Final = {
    "d2f": generation_pb2.ALGORITHM_D2F,
    "block_diffusion": generation_pb2.ALGORITHM_BLOCK_DIFFUSION,
}


class Catalogue:
    """The models known so far."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, ModelInfo] = {}

    def live(self) -> dict[str, ModelInfo]:
        """Models that have a live worker, by name; decode workers describe them first."""
        prefill, decode = live_workers(self._fleet.candidates())
        models = {record.model.name: record.model for record in (*prefill, *decode)}
        self._known |= models
        return models

    def find(self, name: str | None) -> ModelInfo:
        """The model that a request means; raises `InvalidRequest`, `NotFound`, `Unavailable`."""
        models = self.live()
        if name is None:
            return self._only(models)
        findings = Findings()
        check_model_name(name, "model", findings)
        findings.raise_any()
        if name in models:
            return models[name]
        if name in self._known or not models:
            raise Unavailable(f"no worker serves {name!r} now", retry_after_s=1.0)
        there = ", ".join(sorted(models))
        raise NotFound(f"there is no model {shown(name)}; this fleet serves {there}")

    def _only(self, models: dict[str, ModelInfo]) -> ModelInfo:
        if not models:
            raise Unavailable("no worker is live", retry_after_s=1.0)
        if len(models) > 1:
            there = ", ".join(sorted(models))
            raise InvalidRequest.of("model", f"expected one of {there}, got none")
        return next(iter(models.values()))


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService."""

    def __init__(self, fleet: Fleet, catalogue: Catalogue) -> None:
        self._fleet = fleet
        self._catalogue = catalogue

    async def ListModels(
        self,
        request: model_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[
            model_pb2.ListModelsRequest, model_pb2.ListModelsResponse
        ],
    ) -> model_pb2.ListModelsResponse:
        """Models in the order of their names; a page's token is the last name of the one before."""
        after = sorted(name for name in self._catalogue.live() if name > request.page_token)
        most = min(request.page_size or MOST_MODELS_A_PAGE, MOST_MODELS_A_PAGE)
        page = after[:most]
        return model_pb2.ListModelsResponse(
            models=[self._describe(self._catalogue.live()[name]) for name in page],
            next_page_token=page[-1] if len(after) > most else "",
        )

    async def GetModel(
        self,
        request: model_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[model_pb2.GetModelRequest, model_pb2.GetModelResponse],
    ) -> model_pb2.GetModelResponse:
        """One model by its name."""
        findings = Findings()
        check_model_name(request.name, "name", findings)
        findings.raise_any()
        model = self._catalogue.find(request.name)
        return model_pb2.GetModelResponse(model=self._describe(model))

    def _describe(self, model: ModelInfo) -> model_pb2.Model:
        prefill, decode = live_workers(self._fleet.candidates(), model.name)
        return model_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            mask_token_id=model.mask_token_id,
            eos_token_ids=model.eos_token_ids,
            default_algorithm=_ALGORITHMS[model.default_algorithm],
            decode_workers=len(decode),
            prefill_workers=len(prefill),
        )
