"""The transformers built from the operators, weights, adapters, tokenizers, and the bundled model."""
