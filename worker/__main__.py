"""`python -m effuse.worker MODULE`: runs the module of an engine or a rank.

The garbage collector would search all of torch several times while that is imported. It starts
once the module's process is complete (`end_start`). Torch looks through all installed packages for
other devices, which effuse does not use.
"""

import gc
import os
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
