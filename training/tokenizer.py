"""The bundled model's tokenizer: bytes, digits and the words of the generated problems.

Built, not trained: the vocabulary is 5 special tokens, 256 bytes and every word that a fixed sample
of problems uses, so any UTF-8 text round-trips and a digit is always one token.
Training-time only; the router loads the resulting `tokenizer.json` by itself.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from effuse.problems.problem import problem

PAD, EOS, MASK, PROMPT, ANSWER = SPECIALS = (
    "<|pad|>",
    "<|eos|>",
    "<|mask|>",
    "<|prompt|>",
    "<|answer|>",
)
PAD_ID, EOS_ID, MASK_ID, PROMPT_ID, ANSWER_ID = range(5)

SAMPLE_SEED, SAMPLE_SIZE = 0, 20_000

# A digit; a sign between two numbers; a separator or space before a number; a word; any other one.
_PIECES = r"\d| [+*/=-] |[,:] (?=\d)| ?\p{L}+|[,:] |\s|[^\s\p{L}\d]"


def build_tokenizer(sample_size: int = SAMPLE_SIZE) -> Tokenizer:
    """A tokenizer whose words are those of the first `sample_size` problems of seed 0."""
    splitter = _splitter()
    words: set[str] = set()
    for index in range(sample_size):
        drawn = problem(SAMPLE_SEED, index)
        for text in (drawn.prompt, drawn.answer):
            words.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ordered = [*SPECIALS, *letters, *sorted(words.difference(letters))]
    vocabulary = {token: index for index, token in enumerate(ordered)}
    # No merges: a piece is either a token as a whole or falls to its bytes.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{PROMPT} $A {ANSWER}",
        special_tokens=[(PROMPT, PROMPT_ID), (ANSWER, ANSWER_ID)],
    )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`; text that spells a special token is then plain text."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _splitter() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
