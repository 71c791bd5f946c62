"""Tokens at other positions: against plain transformers with `position_ids`, and pair by pair where these say less."""

import pytest
import torch
from captures import run
from families import GROUPED, save_config, with_sizes
from interventions import TOKENS, N, largest, logits, scores_under
from transformers import AutoModelForCausalLM

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.files import MINI
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import scores_from
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loss import token_losses
from tl_posgen.rope.rotation import rotate

APART = torch.arange(N) + 40 * (torch.arange(N) >= N // 2)


def plain_losses(directory, tokens, positions):
    """The losses of the model of transformers alone, with its `position_ids`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        log_p = model(tokens, position_ids=positions.expand(tokens.shape)).logits.double().log_softmax(-1)
    return -log_p[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", ["llama", "neox", "gpt2", "qwen3"])
def test_losses_are_those_of_transformers_with_position_ids(family_model, family_directory, backend, name):
    model = family_model(name, backend)
    with tokens_at(model, APART):
        found = token_losses(model, TOKENS)
    torch.testing.assert_close(found, plain_losses(family_directory(name), TOKENS, APART), atol=1e-4, rtol=1e-4)
    assert largest(found - token_losses(model, TOKENS)) > 1e-2


def test_losses_of_the_bundled_model_are_those_of_transformers_with_position_ids(mini):
    tokens = torch.randint(0, mini.cfg.d_vocab, (2, 64), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64) + 700 * (torch.arange(64) >= 32)
    with tokens_at(mini, positions):
        found = token_losses(mini, tokens)
    torch.testing.assert_close(found, plain_losses(MINI, tokens, positions), atol=1e-4, rtol=0)


def test_windows_hide_what_is_further_away(family_model):
    model = family_model("mistral", "bridge")
    for window_apart in (2, 40):
        positions = torch.arange(N) + window_apart * (torch.arange(N) >= N // 2)
        with tokens_at(model, positions):
            (capture,) = scores_under(model, [], [0])
        shown, away = capture.attn_scores[0] != -torch.inf, positions[:, None] - positions
        assert torch.equal(shown, (away >= 0) & (away < 6))


def test_slopes_grow_with_the_distance(family_model):
    model = family_model("bloom", "bridge")
    plain = run(model, TOKENS[:1], layers=[0])[0].scores()
    with tokens_at(model, APART):
        (capture,) = scores_under(model, [], [0])
    slopes, far = geometry_of(model)[0].alibi_slopes, (slice(N // 2, None), slice(N // 2))
    change = (capture.attn_scores - plain).nan_to_num()
    far_slopes = slopes[:, None, None].expand(-1, N // 2, N // 2).to(change)
    torch.testing.assert_close(change[:, far[0], far[1]], -40 * far_slopes)
    assert largest(change[:, : N // 2]) < 1e-5


def test_layers_without_positions_stay_as_they_are(tmp_path):
    config = with_sizes("SmolLM3Config", GROUPED, no_rope_layers=[0, 1])()
    model = load_model(save_config(config, tmp_path), backend="bridge")
    assert [one.encoding for one in geometry_of(model)] == ["none", "rotary"]
    plain = run(model, TOKENS[:1])
    with tokens_at(model, APART):
        moved = scores_under(model, [])
    torch.testing.assert_close(moved[0].attn_scores, plain[0].scores())
    assert largest((moved[1].attn_scores - plain[1].scores()).nan_to_num()) > 1e-2


def test_functions_of_ones_own_find_the_tokens_there(llama):
    def scores_of(capture):
        q, k = (rotate(x, capture.positions, capture.geometry.rope) for x in (capture.q, capture.k))
        return scores_from(q, k, capture.geometry, capture.heads)

    with tokens_at(llama, APART):
        expected, found = logits(llama), logits(llama, replace_scores(llama, RowByRow(scores_of)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert largest(found - logits(llama, replace_scores(llama, RowByRow(scores_of)))) > 1e-2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("positions", [[0, 1, 2], None, torch.arange(3)[None]])
def test_what_is_no_row_of_positions_is_refused(llama, positions):
    with pytest.raises(InputError, match=r"positions .*: give a tensor \[pos\]"), tokens_at(llama, positions):
        raise AssertionError("entered")


def test_what_has_no_place_there_is_refused(family_model, llama):
    with pytest.raises(InputError, match="rise from 0 or more"), tokens_at(llama, torch.tensor([0, 2, 2])):
        pass
    with pytest.raises(InputError, match="too far for exact angles"), tokens_at(llama, torch.arange(3) + 2**60):
        pass
    with pytest.raises(InputError, match="128 learned positions"), tokens_at(family_model("gpt2"), APART + 100):
        pass
    with tokens_at(llama, APART[:9]), pytest.raises(InputError, match="9 tokens stand at other positions"):
        llama(TOKENS)
    with tokens_at(llama, torch.arange(64)), pytest.raises(InputError, match="without a cache"):
        llama.generate(TOKENS[:1], max_new_tokens=2, verbose=False)
    logits(llama)  # nothing is left behind
