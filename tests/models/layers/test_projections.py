"""What enters W_Q and W_K, and the weights, on every family: queries and keys come out as the model has them."""

import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.session import session_of

TOKENS = torch.arange(3, 15)[None]


def test_a_bias_is_found_where_the_model_has_one(family_model, backend):
    biased, plain = (session_of(family_model(name, backend)).projections(0) for name in ("qwen2", "llama"))
    assert biased.b_q.abs().max() > 0.1
    assert plain.b_q is None or not plain.b_q.any()


def test_grouped_keys_have_one_matrix_a_key_head_and_one_row_a_query_head(llama):
    projections = session_of(llama).projections(0)
    assert (len(projections.w_q), len(projections.w_k)) == (4, 2)
    keys = projections.keys(torch.ones(3, 32))
    torch.testing.assert_close(keys[0], keys[1])


def test_an_input_split_by_head_is_refused(family_model):
    model = family_model("gpt2", "hooked")
    model.set_use_split_qkv_input(True)
    try:
        with pytest.raises(InputError, match="set_use_split_qkv_input"):
            run_capture(model, TOKENS, lambda capture: None, {"inputs"})
    finally:
        model.set_use_split_qkv_input(False)
