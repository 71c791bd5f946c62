"""examples/encodings: scores against their formulas, equal parameters, no interaction where there can be none."""

import math
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rotated_heads import additive_fit

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "encodings"))
import as_qwen2
import attention
import measure
import task
import train

D, N = 32, 20  # d_head, tokens


@pytest.fixture(scope="module", params=attention.ENCODINGS)
def model(request):
    """One of each encoding, its weights large enough that attention is far from uniform."""
    model = train.new_model(64, request.param, seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 3
            layer.self_attn.k_proj.weight *= 3
            if request.param != "plain":
                layer.self_attn.mean_key *= 3
    return model.double()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 64, (N,), generator=torch.Generator().manual_seed(0))


@cache
def rotation(position: int) -> torch.Tensor:
    """R_p as a matrix: plane m turns coordinates m and m + D / 2 by p 10000^(-2m / D)."""
    matrix = torch.zeros(D, D, dtype=torch.float64)
    for m in range(D // 2):
        angle = position * 10000 ** (-2 * m / D)
        cos, sin, other = math.cos(angle), math.sin(angle), m + D // 2
        matrix[m, m], matrix[m, other], matrix[other, m], matrix[other, other] = cos, -sin, sin, cos
    return matrix


def rolled(n: int) -> list[int]:
    """Coordinates whose plane m is plane m - n D / 8 of all D / 2."""
    planes = [(m - n * D // 8) % (D // 2) for m in range(D // 2)]
    return planes + [m + D // 2 for m in planes]


def formula(encoding: str, q, k, mean_key, i: int, j: int, head: int) -> float:
    """The score as the module's docstring writes it."""
    at_i, at_j, s = rotation(i), rotation(j), 1 / math.sqrt(D)
    match encoding:
        case "rope":
            return float(s * (at_i @ q) @ (at_j @ (k + mean_key)))
        case "plain":
            return float(s * (at_i @ q) @ (at_j @ k))
        case "split":
            return float(s * ((at_i @ q) @ (at_j @ mean_key) + q @ k))
        case "added":
            return float(s * ((at_i @ q) @ (at_j @ (k + mean_key)) + q @ k))
        case "several":
            met = sum((at_i @ q[rolled(n)]) @ (at_j @ mean_key[n]) for n in range(4))
            return float(s * (met + q @ k))
        case "alibi":
            return float(s * q @ (k + mean_key) - (i - j) / 4 ** (head + 1))
    return float(s * q @ (k + mean_key))


def parts(layer, hidden):
    """q [4, N, D], k and m [2, ...] straight from the weights; m [2, 4, D] where there are several."""
    q = (hidden @ layer.q_proj.weight.T).view(N, 4, D).transpose(0, 1)
    k = (hidden @ layer.k_proj.weight.T).view(N, 2, D).transpose(0, 1)
    if layer.mean_key is None:
        return q.detach(), k.detach(), [None, None]
    mean_key = layer.mean_key.detach().view(-1, 2, D)
    return q.detach(), k.detach(), mean_key[0] if len(mean_key) == 1 else mean_key.transpose(0, 1)


def brute_force(layer, hidden) -> torch.Tensor:
    q, k, mean_key = parts(layer, hidden)
    scores = torch.full((4, N, N), -torch.inf, dtype=torch.float64)
    for head in range(4):
        for i in range(N):
            for j in range(i + 1):
                group = head // 2
                scores[head, i, j] = formula(
                    layer.config.encoding, q[head, i], k[group, j], mean_key[group], i, j, head
                )
    return scores


def test_attention_is_the_softmax_of_the_formula(model):
    layer = model.model.layers[1].self_attn
    hidden = torch.randn(1, N, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    position_embeddings = model.model.rotary_emb(hidden, torch.arange(N)[None])
    with torch.no_grad():
        output, _ = layer(hidden, position_embeddings)
        single, _ = deepcopy(layer).float()(hidden.float(), [x.float() for x in position_embeddings])
    pattern = brute_force(layer, hidden[0]).softmax(-1)
    v = (hidden[0] @ layer.v_proj.weight.T).view(N, 2, D).transpose(0, 1).repeat_interleave(2, 0)
    expected = (pattern @ v).transpose(0, 1).flatten(1) @ layer.o_proj.weight.T
    assert torch.allclose(output[0], expected, atol=1e-6)  # transformers takes RoPE's angles in float32
    assert torch.allclose(single.double(), expected, atol=1e-5)  # as it was trained
    assert pattern[:, -1].max() > 0.1


def test_captured_scores_are_the_formula(model, tokens):
    hidden = []
    hook = model.model.layers[2].input_layernorm.register_forward_hook(lambda *found: hidden.append(found[-1][0]))
    captured = measure.captures(model, tokens)[2]
    hook.remove()
    expected = brute_force(model.model.layers[2].self_attn, hidden[0].detach())
    assert torch.allclose(captured.scores(), expected, atol=1e-5)


def test_r_is_that_of_dense_least_squares(model, tokens):
    captured = measure.captures(model, tokens)
    numbers, heads = measure.score_numbers(model, tokens[None])
    query, key = np.tril_indices(N)
    design = np.concatenate([np.eye(N)[query - key], np.eye(N)[query], np.eye(N)[key]], 1)
    for layer in captured:
        for head, scores in enumerate(layer.scores()):
            y = scores[query, key].numpy()
            fit = design @ np.linalg.lstsq(design, y, rcond=None)[0]
            row = heads[(heads["layer"] == layer.layer) & (heads["head"] == head)]
            assert row["r"].item() == pytest.approx(np.corrcoef(y, fit)[0, 1], abs=1e-5)
    assert numbers["r"] == pytest.approx(heads["r"].mean())


def test_only_rotated_content_has_an_interaction(model, tokens):
    """Every query at every distance to every key: additive in (query, distance) and (query, key), query by query."""
    encoding = model.config.encoding
    numbers, heads = measure.score_numbers(model, tokens[None])
    layer = model.model.layers[0].self_attn
    q, k, mean_key = parts(layer, model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens)))
    scores = torch.tensor(
        [
            [[formula(encoding, q[3, i], k[1, j], mean_key[1], d, 0, 3) for j in range(N)] for d in range(8)]
            for i in range(1, 4)
        ]
    )
    left_over = [float(one) for one in additive_fit(scores).interaction_share]
    if encoding in ("rope", "plain", "added"):
        assert heads["interaction"].min() > 0.02
        assert min(left_over) > 0.01
    else:
        assert heads["interaction"].max() < 1e-12
        assert max(left_over) < 1e-12
    assert heads[["position", "content", "interaction"]].sum(axis=1).to_numpy() == pytest.approx(1)
    assert set(measure.SCORES) == set(numbers)


def test_encodings_differ_in_nothing_else():
    states = {encoding: train.new_model(64, encoding, seed=3).state_dict() for encoding in attention.ENCODINGS}
    first = states["rope"]
    rest = [name for name in first if "mean_key" not in name]
    for encoding, state in states.items():
        kept = first if encoding in ("rope", "split", "added", "alibi", "none") else rest
        assert state.keys() == set(rest if encoding == "plain" else first)
        assert all(torch.equal(state[name], first[name]) for name in kept)
    several = states["several"]["model.layers.0.self_attn.mean_key"].view(4, -1)
    assert torch.equal(2 * several[0], first["model.layers.0.self_attn.mean_key"])
    assert several.std(-1).min() > several.std() / 2
    other = train.new_model(64, "rope", seed=4).state_dict()
    assert not torch.equal(other["model.layers.0.self_attn.mean_key"], first["model.layers.0.self_attn.mean_key"])


def test_padding_and_a_cache_are_refused(tokens):
    model = train.new_model(64, "split", seed=0)
    with pytest.raises(ValueError, match="unpadded"):
        model(tokens[None], use_cache=True)


def test_a_rope_run_is_a_qwen2(model, tokens):
    if model.config.encoding != "rope":
        with pytest.raises(ValueError, match="only rope"):
            as_qwen2.as_qwen2(model)
        return
    plain = as_qwen2.as_qwen2(model)
    torch.testing.assert_close(plain(tokens[None]).logits, model(tokens[None]).logits)
    assert plain.model.layers[0].self_attn.k_proj.bias.abs().max() > 0.1


def test_a_split_with_rotated_content_is_rope_and_mean_keys_of_one_rotation_are_one():
    q, k, m, m2 = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turn = rotation(9).T @ rotation(4)
    rotated_split = q @ turn @ m + q @ turn @ k
    assert rotated_split * D**-0.5 == pytest.approx(formula("rope", q, k, m, 9, 4, 0))
    one = formula("split", q, k, m + m2, 9, 4, 0)
    assert (q @ turn @ m + q @ turn @ m2 + q @ k) * D**-0.5 == pytest.approx(one)


def test_the_task_asks_for_the_near_value_of_a_and_the_far_one_of_b():
    tokens, answers = task.prompts(500, torch.Generator().manual_seed(0))
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        query = len(row) - 1
        near, far = row[query - task.NEAR], row[query - task.FAR]
        assert near // task.N_VALUES == far // task.N_VALUES
        assert answer == (near if near < task.N_VALUES else far) % task.N_VALUES
    assert (tokens[:, -1] == task.QUERY).all()


@pytest.mark.parametrize("encoding", attention.ENCODINGS)
def test_no_sum_of_position_and_content_solves_the_task(encoding):
    """Near less far, of mark a and of mark b: by a sum of position and content both gain alike."""
    model = task.new_model(encoding, seed=0).double()
    tokens, _ = task.prompts(1, torch.Generator().manual_seed(0))
    gains = []
    for mark in (0, 1):
        tokens[0, [-1 - task.NEAR, -1 - task.FAR]] = 3 + mark * task.N_VALUES
        scores = measure.captures(model, tokens[0])[0].scores()[0, -1]
        gains.append(float(scores[-1 - task.NEAR] - scores[-1 - task.FAR]))
    if encoding in ("rope", "plain", "added"):
        assert abs(gains[0] - gains[1]) > 1e-3
    else:
        assert gains[0] == pytest.approx(gains[1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "solved"), [("plain", True), ("split", False)])
def test_one_head_learns_the_task_with_rotated_content(encoding, solved):
    found = task.accuracy(encoding, seed=0, steps=300)
    assert found > 0.95 if solved else found < task.ONE_DISTANCE + 0.05
