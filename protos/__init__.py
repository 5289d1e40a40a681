"""The wire: contracts and their committed stubs, and the servers and channels that speak it."""
