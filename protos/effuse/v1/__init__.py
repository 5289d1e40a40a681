"""Generated message and service stubs of package effuse.v1."""
