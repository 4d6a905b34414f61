"""Tiny models of every architecture of `transformers`, and what the mode makes of them."""
