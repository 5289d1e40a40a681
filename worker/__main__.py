"""`python -m effuse.worker MODULE`: runs the module of an engine or a rank.

The garbage collector would search all of torch several times while that is imported. It starts
once the module's process is complete (`end_start`).
"""

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
