"""Three-axis fit and variance decomposition of a small trained model, against values measured once and written down.

stories260K on the first 512 tokens of TinyStories, means over its 40 heads.
"""

import pytest
import torch
from torch import Tensor

from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.decomposition.numbers.variance_shares import COMPONENTS, TripleMoments, variance_shares
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate

N_TOKENS = 512


@pytest.fixture(scope="module")
def config_and_tokens(shared):
    transformers = pytest.importorskip("transformers")
    directory = shared / "models" / "stories260K"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = (shared / "text" / "tinystories.txt").read_text(encoding="utf-8")[:10_000]
    return transformers.AutoConfig.from_pretrained(directory), torch.tensor([tokenizer(text).input_ids[:N_TOKENS]])


def queries_and_keys(model, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """q and k before RoPE of every layer, [head, pos, d_head], keys repeated for grouped heads."""
    caught: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _, __, x, name=name: caught[name].append(x[0]))
        for layer in model.model.layers
        for name in caught
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    d_head = model.config.hidden_size // model.config.num_attention_heads
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    heads = [[x.unflatten(-1, (-1, d_head)).transpose(0, 1) for x in layers] for layers in caught.values()]
    return [(q, k.repeat_interleave(groups, 0)) for q, k in zip(*heads, strict=True)]


def measure(model, tokens: Tensor) -> dict[str, float | list[float]]:
    rope = Rope(inverse_frequencies(8, base=10_000.0))
    positions = torch.arange(N_TOKENS)
    rows: dict[str, list[Tensor]] = {
        "r": [],
        "r_without_first_token": [],
        "r_within_rows": [],
        "r_within_rows_without_first_token": [],
    }
    rows |= {name: [] for name in COMPONENTS}
    for q, k in queries_and_keys(model, tokens):
        moments = pair_moments(rotate(q, positions, rope), rotate(k, positions, rope), 8**-0.5)
        assert moments.without_first_token is not None
        for fit, ending in [
            (fit_three_axis(moments), ""),
            (fit_three_axis(moments.without_first_token), "_without_first_token"),
        ]:
            rows["r" + ending].append(fit.r)
            rows["r_within_rows" + ending].append(fit.r_within_rows)
        shares = variance_shares(TripleMoments.from_qk(q, k, rope, first_token=False), rope, 8**-0.5, N_TOKENS - 1)
        for name in COMPONENTS:
            rows[name].append(shares.share(name))
    found = {name: float(torch.stack(values).mean()) for name, values in rows.items()}
    return found | {"per_layer": [float(r.mean()) for r in rows["r_without_first_token"]]}


@pytest.fixture(scope="module")
def trained(shared, config_and_tokens):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(shared / "models" / "stories260K")
    return measure(model, config_and_tokens[1])


@pytest.fixture(scope="module")
def random_init(config_and_tokens):
    transformers = pytest.importorskip("transformers")
    config, tokens = config_and_tokens
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    return measure(model, tokens)


@pytest.mark.parametrize(("name", "value"), [("r", 0.917), ("r_without_first_token", 0.917), ("r_within_rows", 0.863)])
def test_correlation_of_the_trained_model(trained, name, value):
    assert trained[name] == pytest.approx(value, abs=0.002)


def test_correlation_of_every_layer(trained):
    assert trained["per_layer"] == pytest.approx([0.899, 0.933, 0.918, 0.934, 0.899], abs=0.002)


def test_variance_shares_of_the_trained_model(trained):
    expected = dict(zip(COMPONENTS, [0.303, 0.146, 0.364, 0.027, 0.091, 0.052, 0.018], strict=True))
    assert {name: trained[name] for name in COMPONENTS} == pytest.approx(expected, abs=0.002)


def test_a_random_model_of_the_same_shape_is_far_from_it(random_init):
    assert random_init["r_without_first_token"] == pytest.approx(0.323, abs=0.005)
    assert 0.20 < random_init["r_within_rows"] < 0.27
    assert random_init["qkd"] > 0.5
