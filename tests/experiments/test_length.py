"""Length arms on the bundled model, with a short stand-in for the training length."""

import numpy as np
import pytest

from tl_posgen import load, load_model
from tl_posgen.errors import InputError, ModelError
from tl_posgen.experiments.length import ARMS, length
from tl_posgen.maths.output_drift import entropy_and_normaliser
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words import length as words

OPTIONS = {"inside": 16, "times": 3, "n_prompts": 2, "n_global": 2, "block": 4, "n_blocks": 1, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini", backend="bridge")


@pytest.fixture(scope="module")
def result(mini):
    return length(mini, bundled_text(), **OPTIONS)


def test_inside_the_training_length_the_windows_change_nothing(result):
    inside = result.dataset.sel(bin=result.dataset.bin < 12)
    for arm in ("lm_infinite", "retrieval"):
        np.testing.assert_allclose(inside.loss.sel(arm=arm), inside.loss.sel(arm="vanilla"), atol=1e-4)


def test_beyond_it_they_do(result):
    beyond = result.dataset.loss.isel(bin=-1)
    assert len(set(beyond.values.round(6))) == len(ARMS)


def test_windows_keep_the_entropy_down(result):
    entropy = result.dataset.entropy.isel(bin=-1).mean(("layer", "head"))
    assert entropy.sel(arm="lm_infinite") < entropy.sel(arm="vanilla")


def test_the_reference_does_not_drift_from_itself(result):
    first = result.dataset.sel(arm="vanilla", segment=0)
    np.testing.assert_allclose(first.frechet, 0, atol=1e-6)
    np.testing.assert_allclose(first.mahalanobis, 1, atol=1e-6)
    np.testing.assert_allclose(first.norm_ratio, 1, atol=1e-6)
    assert (first.floor > 0).all()


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("loss", "drift", "attention"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert len(result.frame()) == len(ARMS) * 3
    assert load(result.save(tmp_path / "r.nc"))["length"].dataset.equals(result.dataset)


@pytest.mark.parametrize(
    "wrong", [{"inside": 2}, {"times": 0}, {"arms": ("magic",)}, {"n_prompts": 1}, {"times": 9999}]
)
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        length(mini, bundled_text(), **{**OPTIONS, **wrong})


def test_entropy_and_normaliser_are_those_of_the_scores(mini):
    captures = []
    tokens = to_prompts(mini, bundled_text(), length=24, n_prompts=1)[0][None]
    run_capture(mini, tokens, captures.append, frozenset({"attn_scores", "pattern"}), layers=[1])
    scores = captures[0].attn_scores
    weights = scores.double().softmax(-1)
    references = -weights.xlogy(weights).sum(-1), scores.double().logsumexp(-1)
    for mine, reference in zip(entropy_and_normaliser(scores, captures[0].pattern), references, strict=True):
        np.testing.assert_allclose(mine.mean(-1), reference.mean(-1), atol=1e-5)


def test_a_model_that_cannot_run_such_prompts_names_the_backend_that_can():
    try:
        hooked = load_model("mini", backend="hooked")
    except ModelError as error:
        pytest.skip(str(error))
    with pytest.raises(InputError, match='backend="bridge"'):
        length(hooked, bundled_text())


def test_words_say_what_every_arm_does_beside_the_null(result):
    said = words.found(result)
    assert len(said) == len(ARMS) + 1
    assert all("random init" in sentence for sentence in said)


def test_the_short_table_has_a_row_per_arm_and_segment(result):
    table = words.table(result.dataset)
    assert table.shape == (len(ARMS) * 3, 8)
    assert table.notnull().all(axis=None)
