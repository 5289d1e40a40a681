"""The transformers built from the operators, their weights, adapters and tokenizers, and the bundled model."""
