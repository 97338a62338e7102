"""Training one ranker across silos: strategies, engines, apps."""
