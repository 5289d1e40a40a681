"""KV pages at rest and in motion: layout, page pool, handoff, connectors."""
