"""Features from private counts: what each mechanism keeps, bounds and attacks."""
