"""Search across silos: nodes that hold documents, and a broker with one search box."""
