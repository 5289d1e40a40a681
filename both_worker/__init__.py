"""A worker that computes prompts, writes answers or does both, and changes at any time."""
