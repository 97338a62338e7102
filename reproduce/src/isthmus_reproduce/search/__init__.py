"""Search across silos beside one central index, and whether its probabilities hold."""
