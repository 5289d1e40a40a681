"""A fleet on a virtual clock: real engines, pools, handoffs and tables, everything else simulated."""
