"""Settings of a process at its start, and of a request's decoding: frozen values and checks."""
