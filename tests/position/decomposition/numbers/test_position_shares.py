"""Position shares against dense least squares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.numbers.position_shares import PARTS, PositionParts, row_centred

N = 14
I = torch.arange(float(N))  # noqa: E741


@settings(max_examples=15, deadline=None)
@given(window=st.integers(2, N), first=st.booleans(), seed=st.integers(0, 99))
def test_energies_are_those_of_dense_least_squares(window, first, seed):
    distance = (I[:, None] - I).long()
    mask = (distance >= 0) & (distance < window) & (first | ((I > 0) & (I[:, None] > 0)))
    w = row_centred(torch.randn(1, N, N, generator=torch.Generator().manual_seed(seed)), mask)
    query, key = mask.nonzero(as_tuple=True)
    eye = torch.eye(N, dtype=torch.float64)
    axes = {"distance": eye[query - key], "key": eye[key], "line": I.double()[key, None]}
    axes["either"] = torch.cat([axes["distance"], axes["key"]], 1)
    target = w[0][mask]
    energy: dict[str, float] = dict(zip(PARTS, PositionParts(mask).energy(w)[0].tolist(), strict=True))
    assert energy["all"] == pytest.approx(float(target @ target))
    for name, columns in axes.items():
        design = torch.cat([columns, eye[query]], 1)
        fitted = design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
        assert energy[name] == pytest.approx(float(fitted @ target), abs=1e-8), name
