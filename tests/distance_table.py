"""Table of a head's scores for every distance and key, entry by entry."""

import torch

from tl_posgen.rope.scores_at import scores_at_positions


def distance_table(q, k, rope, scale, distances):
    """M_dj = scale <R_d q, R_0 k_j> [head, distance, key]: one query per head with every key at every distance."""
    every = q[:, None].expand(-1, len(distances), -1)
    return scores_at_positions(every, k, rope, scale, distances, torch.zeros(k.shape[1]))
