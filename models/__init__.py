"""The transformers built from the operators, their weights and tokenizers, the bundled model."""
