"""Generated stubs of other projects' protocols, which a router serves beside effuse.v1."""
