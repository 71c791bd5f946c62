"""Built heads give back the function they were built for."""

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.position.planes.numbers.inverse_dft import fit_frequencies, head_for_table
from tl_posgen.rope.rotation import inverse_frequencies, rotate


def table_of(head, n: int) -> torch.Tensor:
    """[query token, key token, distance] of a built head, through the same rotation as a real one."""
    distances = torch.arange(n)
    turned = rotate(head.q[:, None].expand(-1, n, -1), distances, head.rope)
    return torch.einsum("adx,bx->abd", turned, head.k)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_half_as_many_planes_as_distances_and_one_suffice(n):
    values = normal(1, 1, n)
    assert len(head_for_table(values).rope.inv_freq) == n // 2 + 1


@settings(max_examples=40, deadline=None)
@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 33)), seed=st.integers(0, 999))
def test_a_head_realises_any_table_of_tokens_and_distances(shape, seed):
    table = 10 * normal(*shape, seed=seed)
    torch.testing.assert_close(table_of(head_for_table(table), shape[2]), table)


@pytest.mark.parametrize("table", [torch.ones(4), torch.full((1, 1, 4), torch.nan), torch.ones(1, 1, 0)], ids=str)
def test_what_is_no_table_is_refused(unchecked, table):
    with pytest.raises(InputError, match="head_for_table: a table of shape"):
        head_for_table(table)


def test_frequencies_of_the_transform_fit_exactly():
    values = normal(9)
    fitted, _ = fit_frequencies(values, head_for_table(values[None, None]).rope.inv_freq)
    torch.testing.assert_close(fitted, values, atol=1e-10, rtol=0)


def test_the_fit_is_the_least_squares_one_and_its_coefficients_give_the_fitted_values():
    values = normal(2, 50)
    inv_freq = inverse_frequencies(8, 100.0)
    angles = torch.arange(50.0, dtype=torch.float64)[:, None] * inv_freq
    design = torch.cat([angles.cos(), -angles.sin()], 1)
    expected = design @ torch.linalg.lstsq(design, values.T).solution
    fitted, coefficients = fit_frequencies(values, inv_freq)
    torch.testing.assert_close(fitted, expected.T)
    turn = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close((coefficients @ turn.mT).real, fitted)
