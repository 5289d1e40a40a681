"""A setting out of its bounds can be neither made nor read, and errors name the real bounds."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from effuse.client.params import NAMES
from effuse.config import decoding
from effuse.config.decoding import (
    BIAS,
    Alg,
    Algorithm,
    Bounds,
    Cache,
    DecodeSettings,
    Remasking,
    Sampling,
    Score,
    SettingError,
    Stopping,
)
from effuse.v1 import generation_pb2, worker_pb2

PROTO = Path(__file__).parents[2] / "protos/effuse/v1/generation.proto"
GOOD = DecodeSettings(algorithm="d2f", denoising_steps=4)
VALUES: dict[type[msgspec.Struct], msgspec.Struct] = {
    Sampling: Sampling(seed=2**64 - 1),
    Stopping: Stopping(max_tokens=1),
    DecodeSettings: GOOD,
}


def test_bounds_hold_their_ends_and_no_nan() -> None:
    whole = Bounds(1, 64)
    assert [number in whole for number in (0, 1, 64, 65)] == [False, True, True, False]
    share = Bounds(0.0, 1.0, above_low=True)
    # As a float32 of the wire, 1e-46 is 0.
    assert [number in share for number in (0.0, 1e-46, 1e-45, 1.0)] == [False, False, True, True]
    warm = Bounds(1e-3, 100.0, or_zero=True)
    assert [number in warm for number in (0.0, 1e-4, 1e-3, math.inf)] == [True, False, True, False]
    assert not any(math.nan in bounds for bounds in (share, warm))


@pytest.mark.parametrize(
    ("kind", "name", "value", "form"),
    [
        (DecodeSettings, "window", 0, "an integer from 1 to 64"),
        (DecodeSettings, "window", 999, "got 999"),
        (DecodeSettings, "confidence_threshold", math.nan, "a number from 0 to 1, got nan"),
        (DecodeSettings, "block_add_threshold", 1.1, "got 1.1"),
        (DecodeSettings, "full_activation_threshold", -0.1, "got -0.1"),
        (DecodeSettings, "score", "best", "one of confidence, margin, neg_entropy, got 'best'"),
        (DecodeSettings, "algorithm", "ar", "one of d2f, block_diffusion"),
        (DecodeSettings, "remasking", "", "one of low_confidence_dynamic"),
        (DecodeSettings, "denoising_steps", 0, "from 1 to"),
        (Sampling, "temperature", math.inf, "a number from 0.001 to 100, or 0 for greedy"),
        (Sampling, "temperature", -1.0, "got -1"),
        (Sampling, "top_p", 0.0, "a number above 0, at most 1, got 0.0"),
        (Sampling, "top_p", 1e-46, "a number above 0, at most 1, got 1e-46"),
        (Sampling, "top_p", math.nan, "got nan"),
        (Sampling, "top_k", -1, "from 0 to 2147483647; 0 keeps all"),
        (Sampling, "seed", 2**64, "from 0 to 18446744073709551615"),
        (Sampling, "answer_index", 64, "from 0 to 63"),
        (Stopping, "max_tokens", 0, "from 1 to 2147483647"),
        (Stopping, "max_tokens", 2**31, "got 2147483648"),
    ],
)
def test_what_is_out_of_bounds_is_neither_made_nor_read(
    kind: type[msgspec.Struct], name: str, value: object, form: str
) -> None:
    fields = msgspec.structs.asdict(VALUES[kind])
    with pytest.raises(SettingError, match=re.escape(form)) as caught:
        kind(**(fields | {name: value}))
    assert caught.value.name == name
    if isinstance(value, int) and value >= 2**64:
        return  # msgpack cannot express it
    frame = msgspec.msgpack.encode(fields | {name: value})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=kind)


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_survives_the_socket(kind: type[msgspec.Struct]) -> None:
    frame = msgspec.msgpack.encode(VALUES[kind])
    assert msgspec.msgpack.decode(frame, type=kind) == VALUES[kind]


def test_floats_are_those_of_the_wire() -> None:
    message = worker_pb2.DecodeSettings(confidence_threshold=0.9)
    assert GOOD.confidence_threshold == message.confidence_threshold != 0.9
    assert Sampling(top_p=0.3).top_p == struct.unpack("f", struct.pack("f", 0.3))[0]


def test_fields_have_the_names_of_the_wire() -> None:
    def names(message: object) -> set[str]:
        return set(message.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]

    assert names(worker_pb2.DecodeSettings) == set(DecodeSettings.__struct_fields__)
    assert names(worker_pb2.DecodeSampling) == set(Sampling.__struct_fields__)
    assert names(worker_pb2.DecodeRequest) >= set(Stopping.__struct_fields__)
    assert names(generation_pb2.DecodingParams) == set(DecodeSettings.__struct_fields__)
    asked = set(Sampling.__struct_fields__) - {"answer_index"}  # which follows from n
    assert names(generation_pb2.SamplingParams) == asked


@pytest.mark.parametrize(
    ("kind", "numbers", "enum"),
    [
        (Algorithm, NAMES["algorithm"], generation_pb2.Algorithm),
        (Remasking, NAMES["remasking"], generation_pb2.Remasking),
        (Score, NAMES["score"], generation_pb2.Score),
        (Alg, NAMES["alg"], generation_pb2.Alg),
        (Cache, NAMES["cache"], generation_pb2.Cache),
    ],
)
def test_every_name_has_its_number_on_the_wire(
    kind: object, numbers: dict[str, int], enum: type[generation_pb2.Score]
) -> None:
    prefix = enum.DESCRIPTOR.name.upper()
    assert tuple(numbers) == get_args(kind)
    assert [f"{prefix}_{name.upper()}" for name in numbers] == enum.keys()[1:]
    assert [enum.Name(number) for number in numbers.values()] == enum.keys()[1:]


TEMPERATURE = decoding.SAMPLING["temperature"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("temperature", f"from {TEMPERATURE.low} to {TEMPERATURE.high:g}."),
        ("max_tokens", f"Default: the model's, or {decoding.DEFAULT_MAX_TOKENS}, cut"),
        ("window", f"{decoding.WINDOW.low} to {decoding.WINDOW.high}. Default {GOOD.window}."),
        ("confidence_threshold", "Default 0.9."),
        ("block_add_threshold", "Default 0.1."),
        ("full_activation_threshold", "Default 0.95."),
        ("steps", f"At most {decoding.SETTINGS['steps'].high}. Default {GOOD.steps},"),
        ("cfg_scale", f"Default {GOOD.cfg_scale:g}."),
        ("eps", "Default 0.001."),
        ("alg_temp", f"Default {GOOD.alg_temp:g}."),
    ],
)
def test_clients_are_told_the_bounds_and_defaults_that_hold(name: str, told: str) -> None:
    if "threshold" in name:
        assert getattr(GOOD, name) == pytest.approx(float(told.removeprefix("Default ")[:-1]))
    found = re.search(rf"((?:  // .*\n)+)  optional \w+ {name} = ", PROTO.read_text())
    assert found is not None and told in found[1].replace("\n  //", "")


def test_bounds_are_written_as_people_write_them() -> None:
    assert BIAS.form == "a number from -100 to 100"
