"""Ratios against peers, measured in one run: `python -m bench` (or `make bench`)."""
