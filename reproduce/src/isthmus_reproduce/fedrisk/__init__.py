"""FedRisk: Table 1 and Figures 2-5, ablations and attacks."""
