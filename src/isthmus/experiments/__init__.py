"""The papers' tables and figures, computed: one module per paper, and what they share in `notebook`."""
