"""`python -m effuse.worker MODULE`: runs the module of an engine or a rank.

The garbage collector would search all of torch several times while that is imported. It starts
once the module's process is complete (`end_start`). Torch looks through all installed packages for
other devices, which effuse does not use. A fifth of its import are the shapes of results, which
only its compiler uses: `import_shapes` of `rank_part` imports them for it.
"""

import gc
import os
import runpy
import sys
from types import ModuleType

if __name__ == "__main__":
    gc.disable()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.modules["torch._meta_registrations"] = ModuleType("torch._meta_registrations")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
