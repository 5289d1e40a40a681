"""Device operators: Triton kernel, launcher and plain-torch reference; tensors in, tensors out."""
