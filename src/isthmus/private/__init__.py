"""What stands between a silo and the outside; no network code."""
