"""Edits of the running model: replaced scores, on which interventions are built, ablated heads, positions of tokens."""
