"""Calibrated rank fusion: Tables II-VIII and Figure 1."""
