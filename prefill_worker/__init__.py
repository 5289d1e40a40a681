"""Prompt in, KV pages out."""
