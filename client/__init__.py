"""Python client of a fleet: requests answers, whole or streamed; needs no torch."""
