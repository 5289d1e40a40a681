"""The claims of RESULTS.md, reproducible: each figure with its limit, measured in the same run."""
