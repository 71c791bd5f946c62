"""What a measure can say nothing of is refused in one line, before the model runs: models, prompts, heads, options."""

import pytest
import torch

import tl_posgen
from tl_posgen.coupling import Coupling, TokenCoupling
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.joining import Profiles
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import (
    DummyDistance,
    LengthExtrapolation,
    Perturbation,
    PlanePerturbation,
    Planes,
    Residual,
    Substitution,
    Variance,
)
from tl_posgen.rules import Rules
from tl_posgen.slash import BandAblation, Cone, Slash, SlashPlanes, SlashTransfer
from tl_posgen.sources import Sources

TOKENS = torch.arange(2, 26)[None]
NO_ROPE = ("gpt2", "bloom")
MODELS = [  # measure, model, message
    *((one, name, "no layer of this model has RoPE") for one in (Planes(), PlanePerturbation()) for name in NO_ROPE),
    (BandAblation(), "gpt2", "no layer of this model has rotary planes"),
    (DummyDistance(), "gpt2", "know no distance"),
    (LengthExtrapolation(inside=12, times=1), "gpt2", "length_extrapolation needs rotary positions or ALiBi"),
]  # fmt: skip
BEYOND = LengthExtrapolation(inside=16, times=3)
TEXT = {"length": 16, "n_prompts": 2}
WITHOUT_FIRST = "distance 23: without its first token"
PROMPTS = [  # measure, prompts (None: of the bundled text), how they are cut, message
    (Planes(), [[5], [5]], {}, "a prompt has only 1 token"),
    (Planes(), [[5, 6], [5, 6]], {}, "planes: of 2 tokens one at most"),
    (Residual(), torch.arange(4)[None], {}, "4 tokens leaves none; give 5 tokens at least"),
    (Variance(absolute=True), None, {"length": 24, "n_prompts": 7}, "8 at least, not 7; give n_prompts=16"),
    (Variance(absolute=True), [list(range(5, 20 + n)) for n in range(8)], {}, "of one length"),
    (BEYOND, None, {"length": 16, "n_prompts": 1}, "two prompts"),
    (LengthExtrapolation(inside=16, times=9999), None, TEXT, "times|tokens"),
    (BEYOND, None, {"length": 40}, r"times x inside = 3 x 16 .*LengthExtrapolation\(inside=40\)"),
    (Substitution(from_layer=9), None, TEXT, "from_layer 9"),
    (Substitution(from_layer=3), None, {**TEXT, "heads": [(1, 0), (2, 2)]}, "from_layer 3 leaves no layer"),
    (Perturbation(), None, {"length": 9999}, "9999.*512"),
    (Perturbation(conditions=("tokens",)), None, {**TEXT, "heads": (0, 0)}, "condition 'tokens'"),
    (Profiles(period=5000), None, TEXT, "period=5000"),
    (Slash(distances=(24,)), TOKENS, {}, "distance 24: the longest prompt has 24 tokens"),
    (SlashPlanes(distances=(30, 40)), TOKENS, {}, "distance 30: the longest prompt has 24 tokens"),
    *((one(distances=(0, 23)), TOKENS, {}, WITHOUT_FIRST) for one in (SlashTransfer, Cone, BandAblation)),
    (BandAblation(), ["Down, down, down.", "Down, down, down, down."], {}, "prompts of 8 to 10 tokens: give length="),
    (Coupling(k=(129,)), None, TEXT, r"k \[129\]: choose from 1 to 128"),
    (Coupling(k=2), None, {**TEXT, "layers": [0, 7]}, "layer 7 does not exist"),
    (Coupling(k=2, tokens=[24]), TOKENS, {}, r"token \[24\]: choose from -24 to 23"),
    *((one(k=2), None, {**TEXT, "heads": (0, 0)}, "leave heads out") for one in (Coupling, TokenCoupling)),
    (TokenCoupling(k=2, tokens=[-1, 23]), TOKENS, {}, "two different positions"),
    (Rules(budget=6), TOKENS, {}, "give two at least"),
    (Rules(budget=6), torch.arange(5, 19).view(2, 7), {}, "a budget of 5"),
    (Sources(check=True, terms=["content"]), None, TEXT, "check=True needs"),
    (Sources(check=True, sides=["q"]), None, TEXT, "check=True needs"),
    (Sources(check=True), TOKENS, {}, "give two at least"),
]  # fmt: skip


def refused(model, measure, prompts, error, said, **cut):
    session_of(model).layers()

    def fail(*_):
        raise AssertionError("a forward pass was made")

    embed = next(name for name in ("hook_embed", "embed.hook_out") if name in model.hook_dict)
    with model.hooks(fwd_hooks=[(embed, fail)]), pytest.raises(error, match=said) as refusal:
        tl_posgen.analyze(model, prompts, measures=[measure], progress=False, **cut)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("measure", "name", "said"), MODELS)
def test_models_of_which_a_measure_says_nothing_are_refused(family_model, measure, name, said):
    refused(family_model(name, "bridge"), measure, TOKENS, UnsupportedModelError, said)


@pytest.mark.parametrize(("measure", "prompts", "cut", "said"), PROMPTS)
def test_prompts_heads_and_options_that_do_not_fit_are_refused(mini, measure, prompts, cut, said):
    refused(mini, measure, bundled_text() if prompts is None else prompts, InputError, said, **cut)


def test_distances_that_a_model_cannot_take_are_refused(family_model):
    measure, said = DummyDistance(distances=(0, 500)), r"distance 500: .* below distance 128"
    refused(family_model("llama_dynamic", "bridge"), measure, TOKENS, InputError, said)
    prompts, cut = torch.randint(2, 60, (2, 1024)), {"length": 128}
    refused(family_model("llama", "hooked"), LengthExtrapolation(), prompts, InputError, 'backend="bridge"', **cut)
