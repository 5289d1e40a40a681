"""What an engine says of its model: facts that its peers compare, and what clients are told."""

from pathlib import Path

import effuse.models
from effuse.config.checks import name_of_model
from effuse.config.decoding import Algorithm
from effuse.kvtransfer.layout import ModelFacts
from effuse.models.defaults import read_defaults
from effuse.models.transformer import Transformer
from effuse.models.weights import weights_digest
from effuse.placement.records import ModelInfo
from effuse.worker.config import WorkerConfig

# A block's KV is stored by the forward after the one in which it settled.
COMMIT_RULE = "settled_recompute"


def model_directory(config: WorkerConfig) -> Path:
    """Directory of the checkpoint; without one in the config the bundled model's."""
    return config.model or Path(next(iter(effuse.models.__path__))) / "bundled"


def facts_of(config: WorkerConfig, directory: Path, model: Transformer) -> ModelFacts:
    return ModelFacts(
        weights=weights_digest(directory, config.adapter),
        architecture=model.config.architecture,
        block_size=model.config.block_size,
        mask_token_id=model.config.mask_token_id,
        prompt_attention=model.config.prompt_attention,
        commit_rule=COMMIT_RULE,
    )


def model_info(
    config: WorkerConfig,
    directory: Path,
    model: Transformer,
    max_model_len: int,
    default_algorithm: Algorithm | None,
) -> ModelInfo:
    return ModelInfo(
        name=config.served_model_name or name_of_model(directory),
        architecture=model.config.architecture,
        block_size=model.config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        mask_token_id=model.config.mask_token_id,
        eos_token_ids=model.config.eos_token_ids,
        prompt_attention=model.config.prompt_attention,
        defaults=read_defaults(
            directory,
            model.config,
            algorithm=default_algorithm,
            adapted=config.adapter is not None,
        ),
    )
