"""Generated stubs of other people's protocols that a router speaks beside effuse.v1."""
