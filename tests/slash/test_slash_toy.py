"""The shallow transformer learns what it should, on a run short enough for a test."""

import numpy as np
import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.slash import slash_toy
from tl_posgen.slash.toy_model import ShallowTransformer, ToySettings, draw_prompts

SETTINGS = dict(
    distance=3,
    planes="all",
    steps=1,
    batch=4,
    n_tokens=12,
    n_features=3,
    angle=30.0,
    d_head=8,
    rope_base=100.0,
    init_std=1.0,
    learning_rate=0.02,
    seeds=(0, 1),
    every=1,
    snapshots=None,
)


def short(planes="all", steps=150, **options):
    return slash_toy(planes=planes, steps=steps, batch=48, progress=False, **{"seeds": (0,), **options})


@pytest.fixture(scope="module")
def learned():
    return short(snapshots=[0, 150])


@pytest.fixture
def prompts():
    settings = ToySettings(**SETTINGS)
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    model = ShallowTransformer(settings, generators)
    return model, settings, *draw_prompts(settings, generators, n_prompts=5)


def test_slash_head_forms_within_a_hundred_and_fifty_steps(learned):
    score = learned.own.score.sel(features="trained", seed=0)
    assert score[0] < 2 * learned.own.uniform[3]
    assert score[-1] > 0.8


def test_slash_head_works_on_features_it_was_never_trained_on(learned):
    assert learned.own.score.sel(features="unseen", seed=0)[-1] > 0.5


def test_loss_falls_once_the_head_has_formed(learned):
    row = learned.table().iloc[0]
    assert row["loss at end"] < 0.3 * row["loss at start"]


def test_slash_forms_before_the_matching_layer_grows(learned):
    row = learned.frame().iloc[0]
    assert row.slash_step <= row.matching_step


def test_queries_and_keys_become_almost_rank_one(learned):
    assert float(learned.own["r1"].isel(step=-1).min()) > 0.95


@pytest.mark.slow
def test_head_of_the_slowest_planes_alone_fails_to_form():
    row = short("low").table().iloc[0]
    assert row["score"] < 0.3
    assert row["loss at end"] > 0.4
    assert np.isnan(row["formed by step"])


def test_kept_pattern_shows_the_slash_at_the_snapshot(learned):
    pattern = learned.own.pattern.sel(features="trained", seed=0)
    assert pattern.snapshot.values.tolist() == [0, 150]
    diagonal = np.diagonal(pattern.sel(snapshot=150).values, -3)
    assert diagonal.mean() > 0.8
    np.testing.assert_allclose(pattern.sum("key"), 1, atol=1e-5)


def test_profile_ends_in_the_last_score(learned):
    profile = learned.own.profile.sel(distance=3, features="trained")
    np.testing.assert_array_equal(profile, learned.own.score.sel(features="trained").isel(step=-1))


def test_a_seed_gives_the_same_run_alone_and_in_company():
    alone, together = short(steps=20, seeds=(1,)), short(steps=20, seeds=(0, 1))
    np.testing.assert_allclose(alone.own.score.sel(seed=1), together.own.score.sel(seed=1), rtol=1e-3)


def test_global_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    short(steps=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_are_in_the_provenance(learned):
    assert learned.provenance["distance"] == learned.measure.distance == 3


def test_embeddings_lie_on_a_cone_and_are_orthonormal_around_it():
    embeddings = ToySettings(**SETTINGS).embeddings.flatten(0, 1)
    torch.testing.assert_close(embeddings[:, 0], torch.full((6,), np.cos(np.pi / 6)).float())
    around = embeddings[:, 1:]
    torch.testing.assert_close(around @ around.T, torch.eye(6) / 4)


def test_planes_that_are_not_kept_do_not_score(prompts):
    _, settings, _, _ = prompts
    low = ShallowTransformer(
        ToySettings(**{**SETTINGS, "planes": "low"}), [torch.Generator().manual_seed(seed) for seed in (0, 1)]
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
        (dict(seeds=()), "one at least"),
        (dict(seeds=(1, 1)), "each once"),
        (dict(steps=0), "1 or more"),
        (dict(snapshots=[3000]), "steps in 0..1500"),
        (dict(every=0), "1 or more"),
        (dict(learning_rate=-0.1), "a number above 0"),
        (dict(d_head=7), "an even number"),
    ],
)
def test_settings_that_make_no_task_are_refused_before_training(options, message):
    with pytest.raises(InputError, match=message):
        slash_toy(progress=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(planes="fast"), "planes = 'fast': give one of 'all', 'high_medium'"),
        (dict(distance="3"), "distance = '3': give a whole number"),
        (dict(steps=1.5), "steps = 1.5: give a whole number"),
        (dict(angle=None), "angle = None: give a number"),
        (dict(seeds=3), "seeds = 3: give a list"),
        (dict(every="10"), "every = '10': give a whole number"),
        (dict(snapshots=5), "snapshots = 5: give a list"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_as_users_see_it(unchecked, options, message):
    with pytest.raises(InputError, match=message):
        slash_toy(progress=False, **options)


# What is shown


def test_training_has_a_curve_a_seed_in_every_panel_and_two_kinds_of_features_for_the_score(toy):
    traces = toy.plot(kind="training").data
    assert len(traces) == 2 * (1 + 2 + 1 + 1)
    np.testing.assert_array_equal(traces[0].y, toy.own["loss"].isel(seed=0))


def test_the_maps_show_the_attention_at_every_snapshot(toy):
    maps = toy.plot(kind="maps").data
    assert len(maps) == 4
    np.testing.assert_array_equal(maps[1].z, toy.own["pattern"].sel(features="trained", snapshot=4, seed=0))


def test_the_profile_stands_beside_uniform_attention(toy):
    traces = toy.plot(kind="profile").data
    np.testing.assert_array_equal(traces[-1].y, toy.own["uniform"])
    np.testing.assert_array_equal(traces[0].y, toy.own["profile"].sel(features="trained", seed=0))


def test_the_sentences_tell_the_spread_over_seeds(toy):
    score = toy.own["score"].sel(features="trained")
    start, ends, loss = score.isel(step=0), score.isel(step=-1), toy.own["loss"].isel(step=-1)
    first, second = toy.findings()
    assert f"from {float(start.mean()):.3f} at initialisation to " in first
    assert f"to {float(ends.mean()):.3f} ± {float(ends.std(ddof=1)):.3f}" in first
    assert f"(uniform attention {float(toy.own['uniform'][3]):.3f})" in first
    assert f"{float(loss.mean()):.4f} ± {float(loss.std(ddof=1)):.4f}." in first
    assert second.startswith("The head passed one half in 0 of 2 seeds, never; at the end r1(Q) is ")


def test_a_single_seed_is_told_without_a_spread(learned):
    first, second = learned.findings()
    assert f"to {float(learned.own['score'].sel(features='trained').isel(seed=0, step=-1)):.3f}, and " in first
    assert f"in 1 of 1 seeds, by step {int(learned.own['slash_step'][0])};" in second


def test_the_table_has_a_row_a_seed(toy):
    short = toy.table()
    assert short["seed"].tolist() == [0, 1]
    np.testing.assert_array_equal(short["loss at end"], toy.own["loss"].isel(step=-1))
