"""The transformers built from the operators, their weights, and the bundled model."""
