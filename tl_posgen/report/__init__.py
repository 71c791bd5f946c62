"""Presentation of results: figures, sentences and tables, the page, the terminal, circuitsvis."""
