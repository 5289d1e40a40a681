"""A fleet on a virtual clock: real engines, pools, handoffs and tables; the rest is simulated."""
