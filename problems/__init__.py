"""The bundled model's problems: made, and answers to them checked."""
