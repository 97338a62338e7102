"""Features from private counts: the quality under each mechanism, bounds and attacks."""
