"""The shallow transformer learns what it should, on a run short enough for a test."""

import numpy as np
import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.slash import slash_toy
from tl_posgen.slash.slash_toy import ShallowTransformer, SlashToy, draw_prompts

pytestmark = pytest.mark.longer

TASK = {"n_tokens": 12, "n_features": 3, "batch": 4, "steps": 1, "every": 1, "seeds": (0, 1)}
SETTINGS = {**TASK, "d_head": 8, "rope_base": 100.0, "init_std": 1.0}


def short(planes="all", steps=150, **options):
    return slash_toy(planes=planes, steps=steps, batch=48, progress=False, **{"seeds": (0,), **options})


@pytest.fixture
def prompts():
    settings = SlashToy(**SETTINGS)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    model = ShallowTransformer(settings, generators)
    return model, settings, *draw_prompts(settings, generators, n_prompts=5)


def test_slash_head_forms_within_a_hundred_and_fifty_steps_and_works_on_unseen_features():
    learned = short(snapshots=[0, 150])
    data, row = learned.trained.isel(seed=0), learned.table().iloc[0]
    trained, unseen = data.score
    assert trained[0] < 2 * data.uniform[3]
    assert trained[-1] > 0.8
    assert unseen[-1] > 0.5
    assert row["loss at end"] < 0.3 * row["loss at start"]
    assert float(data.r1.isel(step=-1).min()) > 0.95
    assert 0 < row["formed by step"] <= 150
    [told] = learned.findings()  # of a single seed there is no spread
    assert f"to {float(trained[-1]):.3f}, and " in told


@pytest.mark.slow
def test_head_of_the_slowest_planes_alone_fails_to_form():
    row = short("low").table().iloc[0]
    assert row["score, trained"] < 0.3
    assert row["loss at end"] > 0.4
    assert np.isnan(row["formed by step"])


def test_a_seed_gives_the_same_run_alone_and_in_company_and_leaves_global_random_numbers_alone():
    before = torch.get_rng_state()
    alone, together = short(steps=20, seeds=(1,)), short(steps=20, seeds=(0, 1))
    np.testing.assert_allclose(alone.trained.score.sel(seed=1), together.trained.score.sel(seed=1), rtol=1e-3)
    assert torch.equal(torch.get_rng_state(), before)


def test_embeddings_lie_on_a_cone_and_are_orthonormal_around_it():
    embeddings = SlashToy(**SETTINGS).embeddings.flatten(0, 1)
    torch.testing.assert_close(embeddings[:, 0], torch.full((6,), np.cos(np.pi / 6)).float())
    around = embeddings[:, 1:]
    torch.testing.assert_close(around @ around.T, torch.eye(6) / 4)


def test_planes_that_are_not_kept_do_not_score(prompts):
    _, settings, _, _ = prompts
    low = ShallowTransformer(
        SlashToy(**{**SETTINGS, "planes": "low"}), [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    )
    projected = low.projected(low.w_q, settings.embeddings[0])
    used = projected.abs().amax((0, 1)) > 0
    assert used.tolist() == [False, False, False, True] * 2


def test_pattern_is_the_softmax_of_rotated_queries_and_keys_written_out(prompts):
    model, settings, tokens, _ = prompts
    features = settings.embeddings[0]
    theta = settings.rope.inv_freq
    seed, prompt, query = 1, 2, 7
    scores = []
    for key in range(query + 1):
        q = features[tokens[seed, prompt, query]] @ model.w_q[seed]
        k = features[tokens[seed, prompt, key]] @ model.w_k[seed]
        z = torch.complex(q[:4], q[4:]) * torch.complex(k[:4], k[4:]).conj()
        scores.append((z * torch.exp(1j * theta * (query - key))).real.sum())
    expected = torch.stack(scores).softmax(0).float()
    torch.testing.assert_close(model.pattern(tokens, features)[seed, prompt, query, : query + 1], expected)


def test_prediction_is_the_attended_mean_of_the_labels_shown(prompts):
    model, settings, tokens, values = prompts
    features, distance, n = settings.embeddings[0], settings.distance, settings.n_tokens
    seed, prompt = 1, 3
    pattern, stream = model.pattern(tokens, features)[seed, prompt], tokens[seed, prompt]
    logits, labels = [], []
    for j in range(distance, n - 1):
        seen = torch.zeros(settings.n_features).index_add(0, stream[: j + 1], pattern[j, : j + 1])
        logits.append(model.matching[seed, stream[-1]] @ seen)
        labels.append(values[seed, prompt, j - distance])
    expected = torch.stack(logits).softmax(0) @ torch.stack(labels)
    torch.testing.assert_close(model(tokens, values, features)[seed, prompt], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(distance=46), "allow 0..45"),
        (dict(snapshots=[3000]), "steps in 0..1500"),
        (dict(d_head=7), "an even number"),
    ],
)
def test_settings_that_make_no_task_are_refused_before_training(unchecked, options, message):
    with pytest.raises(InputError, match=message):
        slash_toy(progress=False, **options)
