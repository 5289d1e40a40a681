"""The protos with their committed stubs, and the servers and channels that use them."""
