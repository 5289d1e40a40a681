"""The reference decoder: no cache, dense masks, plain torch, nothing of effuse's but the weights.

The entry is `decode`. It is slow on purpose: every step recomputes the whole sequence, so that a
reader can see exactly the result that the engine must reproduce.
"""
