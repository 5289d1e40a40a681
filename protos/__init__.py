"""The wire: contracts and their committed stubs, and the little needed to speak them."""
