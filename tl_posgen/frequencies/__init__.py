"""RoPE's planes: their frequencies changed, held beyond a distance, and what a model uses each for."""
