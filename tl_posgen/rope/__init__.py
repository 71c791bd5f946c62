"""RoPE as geometry: rotations, planes, spectra, scores at any positions, sums over a causal band."""
