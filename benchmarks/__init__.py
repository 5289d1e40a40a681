"""What RESULTS.md claims, reproducible: each figure beside its limit, measured in the same run."""
