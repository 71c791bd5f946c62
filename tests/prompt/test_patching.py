"""Parts of one prompt's scores in the pass of another, on both kinds of model."""

import pytest
import torch
from captures import run

from tl_posgen.errors import InputError
from tl_posgen.hooks import patch_parts
from tl_posgen.models.session import session_of
from tl_posgen.prompt import reference_of, split

RUN, OTHER = torch.randint(2, 60, (2, 12), generator=torch.Generator().manual_seed(3))
TEXT = torch.randint(2, 60, (2, 16), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=[("llama", "hooked"), ("llama", "bridge"), ("gemma2", "bridge"), ("bloom", "bridge")], ids=str)
def model(request, family_model):
    return family_model(*request.param)


def means(model):
    return reference_of(model, TEXT, layers=[0], length=16, sources=False)


def scores(model, tokens, hooks=()):
    with model.hooks(fwd_hooks=list(hooks)):
        return run(model, tokens[None], {"attn_scores"}, layers=[0])[0].attn_scores


def test_chosen_parts_are_those_of_the_other_prompt_and_the_rest_stays(model):
    reference = means(model)
    own, other = (split(model, one, heads=(0, 1), reference=reference) for one in (RUN, OTHER))
    for parts in (("position",), ("content",), ("interaction", "key_part")):
        hooks = patch_parts(model, OTHER, parts, heads=[(0, 1)], reference=reference)
        wanted = own["score"] + sum(other[name] - own[name] for name in parts)
        cap = session_of(model).layer(0).geometry.soft_cap
        wanted = torch.from_numpy(wanted.values[0])
        wanted = wanted if cap is None else cap * (wanted / cap).tanh()
        found, wanted = scores(model, RUN, hooks)[1].softmax(-1), wanted.nan_to_num(-torch.inf).softmax(-1)
        torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(scores(model, RUN, hooks)[0], scores(model, RUN)[0])


def test_with_all_parts_the_head_attends_as_on_the_other_prompt(model):
    hooks = patch_parts(model, OTHER, ("position", "content", "interaction"), heads=[(0, 1)], reference=means(model))
    found, wanted = (one[1].softmax(-1) for one in (scores(model, RUN, hooks), scores(model, OTHER)))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_unknown_parts_and_other_lengths_are_refused(family_model):
    model = family_model("llama", "hooked")
    with pytest.raises(InputError, match="any of position"):
        patch_parts(model, OTHER, ("phase",))
    hooks = patch_parts(model, OTHER, heads=[(0, 1)], reference=means(model))
    with pytest.raises(InputError, match="give as many"):
        model.run_with_hooks(RUN[None, :8], fwd_hooks=hooks)
