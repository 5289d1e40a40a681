"""The two-process shell of both workers: front, engine process, their messages, health, drain."""
