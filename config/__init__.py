"""What a process is told at its start, and a decoder with a request: frozen values and checks."""
