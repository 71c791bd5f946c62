"""How results are shown: figures, sentences and tables, the page, the terminal, circuitsvis."""
