"""Training one ranker across silos: aggregation, rounds, apps, runtimes."""
