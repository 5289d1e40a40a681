"""Counter-based randomness: Philox4x32-10 and the Gumbel noise drawn from it.

The same (key, counter) gives the same number on every device and in every batch; there is no state.
Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
KEY_STEP_0 = 0x9E3779B9
KEY_STEP_1 = 0xBB67AE85
LOW_32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, seed: Tensor) -> Words:
    """Four words of 32 bits, each as int64 in 0..2**32-1, for broadcastable int64 tensors.

    ``seed`` is the bit pattern of a uint64: its low half is the first key word, its high half the
    second. Counter words are modulo 2**32.
    """
    c0, c1, c2, c3 = (word & LOW_32 for word in counter)
    key_0, key_1 = seed & LOW_32, (seed >> 32) & LOW_32
    for _ in range(ROUNDS):
        # Products wrap around in int64; the masks below read their 64 bits as unsigned.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c2 = (
            ((product_1 >> 32) & LOW_32) ^ c1 ^ key_0,
            ((product_0 >> 32) & LOW_32) ^ c3 ^ key_1,
        )
        c1, c3 = product_1 & LOW_32, product_0 & LOW_32
        key_0, key_1 = (key_0 + KEY_STEP_0) & LOW_32, (key_1 + KEY_STEP_1) & LOW_32
    return c0, c1, c2, c3


def gumbel_noise(
    seed: Tensor, position: Tensor, denoise_count: Tensor, answer_index: Tensor, vocab_size: int
) -> Tensor:
    """Standard Gumbel noise [R, vocab_size] fp32 for the rows' keys and counters, each [R].

    Token i takes word i % 4 of counter (i // 4, position, denoise_count, answer_index).
    """
    quads = torch.arange((vocab_size + 3) // 4, device=seed.device)
    columns = [x.long()[:, None] for x in (position, denoise_count, answer_index)]
    words = philox_4x32((quads[None, :], columns[0], columns[1], columns[2]), seed[:, None])
    word = torch.stack(words, dim=-1).view(len(seed), -1)[:, :vocab_size]
    return gumbel_of_words(word)


def gumbel_of_words(word: Tensor) -> Tensor:
    """-log(-log(u)) as fp32, for u = (word >> 8) * 2**-24 + 2**-25 of words in 0..2**32-1.

    Computed in fp64: in fp32 the largest u would round to 1, and the noise that decides a draw is
    made of u close to 1.
    """
    uniform = (word >> 8).double() * 2.0**-24 + 2.0**-25
    return -(-uniform.log()).log().float()
