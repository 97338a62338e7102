"""LambdaMART across silos (extra `trees`): XGBoost's federated communicator over mutual TLS.

LambdaMART's gradients need whole queries and its histograms add up, so silos that hold whole queries can grow
the same trees as one pooled table; only the quantile cuts of fine features differ a little. A silo sends
quantile summaries of its features and, for every node of every tree, its histogram of gradients: no row, but
no DP guarantee either.
"""

from isthmus_reproduce.trees.certificates import Papers, Seat, make_papers
from isthmus_reproduce.trees.exchange import Exchange
from isthmus_reproduce.trees.silos import train_silo, train_silos

__all__ = ["Exchange", "Papers", "Seat", "make_papers", "train_silo", "train_silos"]
