"""RoPE as geometry: rotations, planes, spectra, scores at arbitrary positions, sums over a causal band."""
