"""One layer's attention as mathematics: geometry, captured queries and keys, projections, blocks of rows."""
