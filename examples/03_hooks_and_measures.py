# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your hooks beside ours, and a measure of your own
#
# Measures and interventions are TransformerLens hooks. You measure a model under an ablation of yours, compare it with the intact
# model, add up interventions, and declare a measure.

# %%
import torch

import tl_posgen
from tl_posgen.models import bundled_text, to_prompts

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
text = bundled_text()
cut = {"length": 128, "n_prompts": 4, "progress": False}
tokens = to_prompts(model, text, length=128, n_prompts=1)[0][None]
tokens.shape

# %% [markdown]
# ## Measures as hooks
#
# Inside `attach` every forward pass feeds the measures, beside hooks of your own: here all values of layer 0 are set to zero.


# %%
def zero_values(value, hook):
    return torch.zeros_like(value)


frames = {}
for name, hooks in {"intact": [], "ablated": [("blocks.0.attn.hook_v", zero_values)]}.items():
    with tl_posgen.attach(model, "three_axis") as run:
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    frames[name] = run.report()["three_axis"].frame().set_index(["layer", "head"])

(frames["ablated"] - frames["intact"])["r_within_rows"].groupby("layer").mean().round(3)

# %% [markdown]
# ## The same over many prompts, with intervals
#
# `analyze` takes your hooks, and measures the random init under them too. `compare` pairs the intervals by prompt.

# %%
intact = tl_posgen.analyze(model, text, measures="three_axis", **cut)
hooked = tl_posgen.analyze(model, text, measures="three_axis", fwd_hooks=[("blocks.0.attn.hook_v", zero_values)], **cut)
compared = tl_posgen.compare(intact, hooked, names=("intact", "ablated"))["comparison"]
print(*compared.findings(), sep="\n")

# %%
compared.plot()

# %% [markdown]
# ## From a cache you already have
#
# The cache has to hold the hook points that `needed_names` lists.

# %%
from tl_posgen.models import needed_names

_, cache = model.run_with_cache(tokens, names_filter=needed_names(model))
tl_posgen.analyze_cache(model, cache, tokens=tokens, measures="three_axis")["three_axis"].heads(3).round(3)

# %% [markdown]
# ## Interventions add up
#
# Interventions are lists of hooks, here on different heads; a function of a layer's capture makes one too. The loss says what
# each costs.

# %%
from tl_posgen.hooks import at_dummy_distance, replace_scores
from tl_posgen.models.loss import token_losses

frozen = at_dummy_distance(model, beyond=8, heads=[(1, 0), (2, 0)])
flatter = replace_scores(model, lambda capture: 0.5 * capture.scores(), layers=[3])
for name, hooks in {"untouched": [], "frozen": frozen, "flatter": flatter, "both": frozen + flatter}.items():
    print(f"{name:10} {token_losses(model, tokens, hooks).mean():.3f} nats")

# %% [markdown]
# ## A measure of your own
#
# A frozen dataclass: its fields are its options, its docstring is its description. `of_layer` is fed one layer of one prompt
# at a time; means over prompts, the random inits, intervals, tables and pages come by themselves.

# %%
from dataclasses import dataclass

from tl_posgen import Measure, Variable
from tl_posgen.report.head_figures import head_map


@dataclass(frozen=True)
class MeanKeyShare(Measure):
    """|E k|^2 / E |k|^2 of the keys before RoPE, over the tokens from `first` on.

    The share of the energy of a head's keys that their mean has.

    Args:
        first: the first token that counts.

    Source: ours
    """

    first: int = 0

    question = "How much of a head's keys is their mean?"
    variables = {"share": Variable("mean key share", headline="mean_key_share", interval=True, bounds=(0, 1))}
    figures = {"map": head_map("share", title="Mean key share")}

    def of_layer(self, layer):
        keys = layer.k[:, self.first :].double()
        return {"share": keys.mean(1).square().sum(-1) / keys.square().sum(-1).mean(-1)}

    def findings(self, numbers):
        return [f"Mean keys hold {numbers('share'):.0%} of the energy of keys."]


share = MeanKeyShare()(model, text, nulls=3, **cut)
print(*share.findings(), sep="\n")

# %%
share.plot()

# %% [markdown]
# It runs beside the others, under your hooks, and in a report:

# %%
report = tl_posgen.analyze(model, text, measures=["three_axis", MeanKeyShare(first=1)], **cut)
report.write("report-03")
report["mean_key_share"].heads(3).round(3)
