"""The bundled model's problems: generating them, and checking answers."""
