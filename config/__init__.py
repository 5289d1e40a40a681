"""A process's config, one frozen value: its command line, and the checks that all configs share."""
