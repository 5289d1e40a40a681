"""Facts about a fleet before `effuse bench`: model, settings, workers, fitting prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from effuse.cli.dataset import Item, fits, too_long
from effuse.cli.load import Traffic
from effuse.client.client import Client
from effuse.client.params import Params
from effuse.protos.errors import InvalidRequest
from effuse.v1 import model_pb2

_LOOK_S = 10.0
_SHOWN = ("algorithm", "max_tokens", "window", "confidence_threshold", "temperature")


@dataclass(frozen=True, slots=True)
class Served:
    """A fleet's model, and its workers in the form 1P1D: one prefill and one decode worker."""

    model: model_pb2.Model
    workers: str
    refused: str  # a line about the prompts that do not fit; empty if all do


def look(traffic: Traffic, items: Sequence[Item]) -> Served:
    """Queries the router. Raises EffuseError if it does not answer or does not serve this model."""
    shown = traffic.credentials
    with Client(
        traffic.target, timeout_s=_LOOK_S, max_attempts=1, tls=shown.tls, token=shown.token
    ) as client:
        model = _model(client.models(), traffic.params.model)
        workers = [one for one in client.workers() if one.model == model.name]
        distinct = dict.fromkeys(traffic.prompts)
        taken = {prompt: _takes(client, model, prompt, traffic.params) for prompt in distinct}
    prefill = sum(one.role == model_pb2.WORKER_ROLE_PREFILL for one in workers)
    asked = traffic.params.max_tokens
    room = f"{model.max_model_len} tokens" + (
        "" if asked is None else f" with --max-tokens {asked}"
    )
    listed = list({one.prompt: one for one in items}.values())
    refused = too_long(listed, [taken.get(one.prompt, True) for one in listed], room)
    return Served(model, f"{prefill}P{len(workers) - prefill}D", refused)


def settings(served: Served, params: Params) -> str:
    """The most important settings, from the request or otherwise the model's own."""
    defaults = MessageToDict(served.model.defaults, preserving_proto_field_name=True)
    known: dict[str, Any] = {
        **defaults.get("decoding", {}),
        **defaults.get("sampling", {}),
        "max_tokens": served.model.defaults.max_tokens,
    }
    known["algorithm"] = str(known.get("algorithm", "")).removeprefix("ALGORITHM_").lower()
    known |= {name: value for name, value in asdict(params).items() if value is not None}
    shown = [(name, known[name]) for name in _SHOWN if name in known]
    return ", ".join(f"{name} {_text(value)}" for name, value in shown)


def _model(models: Sequence[model_pb2.Model], name: str | None) -> model_pb2.Model:
    found = [one for one in models if name in (None, one.name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(one.name for one in models) or "none"
    raise InvalidRequest.of("model", f"expected one of the served models with --model: {listed}")


def _takes(client: Client, model: model_pb2.Model, prompt: str, params: Params) -> bool:
    try:
        ids = client.tokenize(prompt, model=model.name)
    except InvalidRequest:
        return False
    return fits(len(ids), params.max_tokens, model.max_model_len)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
