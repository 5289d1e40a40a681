"""KV pages in, committed tokens out: the denoising loop."""
