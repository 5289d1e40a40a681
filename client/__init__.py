"""A fleet's client in Python: asks for answers, whole or as they are written; needs no torch."""
