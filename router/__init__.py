"""Text, people, policy: public API, tokenising, admission, choosing workers, relaying."""
