"""The engine of measures: what a measure is, how it is run, and the numbers, results and files that come of it."""
