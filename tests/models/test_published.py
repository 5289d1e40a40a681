"""docs/models.md has the result of every published model's configuration."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from effuse.models.config import ModelConfig
from effuse.models.config_keys import CheckpointError
from effuse.models.defaults import read_defaults
from effuse.models.families import FAMILIES, MISSING

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
FILE = Path(__file__).with_name("published_configs.json")
ALGORITHMS = {
    "d2f": "D2F",
    "block_diffusion": "block diffusion",
    "llada": "its own loop",
    "dream": "its own loop",
    "fast_dllm_v2": "its own loop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model's configuration, as far as it is known, and its source."""

    name: str
    source: str
    config: dict[str, Any]
    adapter: bool = False

    def row(self, directory: Path) -> tuple[str, str, str, str]:
        """The page's row for it."""
        says = f"`{self.config['model_type']}`, `{self.config['architectures'][0]}`"
        return self.name, says, self.outcome(directory), self.source

    def outcome(self, directory: Path) -> str:
        (directory / "config.json").write_text(json.dumps(self.config))
        try:
            config = ModelConfig.from_dir(directory)
        except CheckpointError as refused:
            return "no: " + str(refused).split("): ", 1)[1]
        settings = read_defaults(directory, config, adapted=self.adapter).settings
        return f"{ALGORITHMS[settings.algorithm]}, blocks of {config.block_size}"


MODELS = {one["name"]: PublishedModel(**one) for one in json.loads(FILE.read_text())}
ROWS = {
    match[1]: (match[1], match[2], match[3], match[4])
    for match in re.finditer(r"^\| (\S+) \| (`.+`) \| (.+) \| (\w+) \|$", PAGE, re.MULTILINE)
}


def test_page_and_configurations_are_of_the_same_models() -> None:
    assert list(ROWS) == list(MODELS) and len(MODELS) >= 20


@pytest.mark.parametrize("name", MODELS)
def test_a_row_says_what_its_configuration_gives(name: str, tmp_path: Path) -> None:
    assert ROWS[name] == MODELS[name].row(tmp_path)


def test_every_family_and_every_refusal_has_a_row() -> None:
    named = {one.config["architectures"][0] for one in MODELS.values()}
    assert not set(MISSING) - named
    assert all(named & set(family.classes) for family in FAMILIES)
