"""Statistics that several subjects share: correlations, agreement of two measurements, intervals."""
