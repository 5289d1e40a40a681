"""A prefill worker's rank, started by its leader."""

from effuse.worker.config import PrefillConfig
from effuse.worker.rank_process import main

if __name__ == "__main__":
    main(PrefillConfig)
