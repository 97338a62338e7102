"""Cross-silo federated ranking: Table 4, Figures 6 and 8, and a map of the gain."""
