"""Device operators: Triton kernel, launcher and plain-torch reference in one file; tensors in, tensors out."""
