"""Where ranks of several hosts meet. Ranks of one host meet at a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class SharedMeeting:
    """A place at which ranks of several hosts meet, as a file is for those of one."""

    store: Any  # of torch's
    name: str  # of this meeting in the store
    interface: str  # of this host, for collectives

    def with_name(self, name: str) -> SharedMeeting:
        """Another meeting of these hosts."""
        return replace(self, name=name)
