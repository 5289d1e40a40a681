"""Live workers and the places of requests; the only folder that uses Redis."""
