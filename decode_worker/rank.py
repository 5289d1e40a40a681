"""A decode worker's rank, started by its leader."""

from effuse.decode_worker.build import limits_of
from effuse.decode_worker.device_stepper import DeviceStepper, make_stepper
from effuse.worker.config import DecodeConfig
from effuse.worker.rank_part import RankPart
from effuse.worker.rank_process import main


def make_steps(config: DecodeConfig, part: RankPart) -> DeviceStepper:
    """The slots of a rank's device."""
    return make_stepper(part.model, part.memory.layer_views(), limits_of(config, part))


if __name__ == "__main__":
    main(DecodeConfig, make_steps)
