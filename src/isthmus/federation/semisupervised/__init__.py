"""Training together on pairs that nobody could label: CS-F-LTR and what is right when counts are noisy."""
