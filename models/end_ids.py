"""The token ids that end an answer, from a checkpoint's files.

config.json and generation_config.json name ids, and all of them count. If neither has any,
tokenizer_config.json names the end by its text, and the tokenizer's own list has its id.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from effuse.models.config_keys import CheckpointError, ConfigKeys, read_json_object

GENERATION_CONFIG, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def end_ids(
    directory: Path, config: ConfigKeys, otherwise: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """At least one id, beginning with those of config.json; `otherwise` if no file names one.
    Raises CheckpointError that names the files if there is none at all.
    """
    named = [token for ids in stated_end_ids(directory, config).values() for token in ids]
    if not named:
        named += otherwise
    if not named:
        raise config.error(
            "eos_token_id",
            "missing; expected a token id here or in generation_config.json, "
            "or an eos_token in tokenizer_config.json",
        )
    return tuple(dict.fromkeys(named))


def stated_end_ids(directory: Path, config: ConfigKeys) -> Mapping[str, tuple[int, ...]]:
    """The ids by the file that names them; empty without any."""
    found = {"config.json": config.token_ids("eos_token_id", required=False)}
    path = directory / GENERATION_CONFIG
    if path.exists():
        found[path.name] = ConfigKeys.read(path).token_ids("eos_token_id", required=False)
    if not any(found.values()):
        found[TOKENIZER_CONFIG] = tuple(_of_tokenizer(directory))
    return {name: ids for name, ids in found.items() if ids}


def _of_tokenizer(directory: Path) -> list[int]:
    """The id of tokenizer_config.json's eos_token; empty if it names none."""
    path = directory / TOKENIZER_CONFIG
    if not path.exists():
        return []
    config = read_json_object(path)
    stated = config.get("eos_token")
    text = stated.get("content") if isinstance(stated, dict) else stated
    if text is None:
        return []
    for token, content in _added_tokens(directory, config):
        if content == text:
            return [token]
    raise CheckpointError(
        f"{path}: eos_token: {text!r} has no id in added_tokens_decoder or in tokenizer.json"
    )


def _added_tokens(directory: Path, config: dict[str, object]) -> Iterator[tuple[int, object]]:
    """Ids and texts of the tokens outside the vocabulary."""
    decoder = config.get("added_tokens_decoder")
    for token, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and str(token).isdecimal():
            yield int(token), entry.get("content")
    path = directory / "tokenizer.json"
    added = read_json_object(path).get("added_tokens") if path.exists() else None
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            yield entry["id"], entry.get("content")
