"""The two-process shell both workers wear: front, engine process, their messages, health, drain."""
