"""What every test gets: one torch thread, and the checkout's root kept off the import path."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONSAFEPATH", "1")
