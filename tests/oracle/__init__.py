"""The reference decoder: no cache, dense masks, plain torch, nothing of effuse's but the weights.

`decode` is the way in. It is slow on purpose: every step recomputes the whole sequence, so that
what the engine must reproduce can be read off the page.
"""
