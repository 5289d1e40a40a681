"""A rank of a worker of both kinds, started by its leader."""

from effuse.decode_worker.rank import make_steps
from effuse.worker.config import BothConfig
from effuse.worker.rank_process import main

if __name__ == "__main__":
    main(BothConfig, make_steps)
