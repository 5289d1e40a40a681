"""What the README claims, reproducible: each figure beside its limit, measured in the same run."""
