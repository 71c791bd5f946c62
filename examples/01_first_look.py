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
# # A first look: how does this model's attention use position?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tl-posgen/tl_posgen/blob/main/examples/01_first_look.ipynb)
#
# You load a model, measure it, read the table, look at the pictures, hand the heads that you found to the next experiment,
# and declare a measure of your own. It runs in a minute on the mini model that comes with the package.

# %%
# The published package; in a checkout, install that instead.
# %pip install --quiet tl-posgen

# %%
from importlib.metadata import version

import torch

import tl_posgen

for package in ("tl-posgen", "transformer-lens", "torch", "transformers", "numpy"):
    print(package, version(package))

# %% [markdown]
# ## Load a model, and see what it does with positions
#
# `load_model` takes a Hub name, a Hugging Face directory, or `"mini"`. `check` reads each layer's geometry and proves it:
# it recomputes the attention scores of a few tokens from `q` and `k` and compares them with the model's own.

# %%
model = tl_posgen.load_model("mini")
tl_posgen.check(model, printed=False)

# %% [markdown]
# ## Measure
#
# One forward pass per prompt feeds every measure; the same is done for a randomly initialised model of the same shape.

# %%
from tl_posgen.models import bundled_text

text = bundled_text()  # Alice's Adventures in Wonderland; the mini model was not trained on it
cut = {"length": 128, "n_prompts": 4}
report = tl_posgen.analyze(model, text, measures=["three_axis", "variance", "attention_examples", "slash"], **cut)
print(*report.findings(), sep="\n")

# %% [markdown]
# ## Read the table
#
# `r`: correlation of a head's scores with position + query + key. `r_within_rows`: the same within rows, which is all that
# softmax can see. `r_without_first_token`: the first token left out. Every variable says what it is.

# %%
report["three_axis"].frame().round(3)

# %%
report["three_axis"].dataset["r_within_rows"].attrs["description"]

# %%
own, null = report["three_axis"].summary, report["three_axis"].null_summary
print(f"r within rows: trained {own['r_within_rows']:.3f}, random init {null['r_within_rows']:.3f}")

# %% [markdown]
# ## Look
#
# Each picture says which model it shows and draws the null beside it. `kinds` lists what there is.

# %%
print(report["three_axis"].kinds, report["variance"].kinds)
report["variance"].plot()

# %%
report["three_axis"].plot("curves")

# %% [markdown]
# Token by token, with circuitsvis: the true pattern of the most position-driven head, the pattern of its additive fit,
# and the difference.

# %%
report["attention_examples"].show()

# %% [markdown]
# ## From a finding to the next experiment
#
# `heads` gives the strongest heads of a measure; measures and interventions take them as they are. Here the strongest slash
# heads lose RoPE, and the loss says what it is worth to them.

# %%
from tl_posgen.models import to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.slash import ablate_bands

heads = report.heads("slash", top=3)
tokens = to_prompts(model, text, length=128, n_prompts=1)[0][None]
for name, hooks in {"as it is": [], "without RoPE": ablate_bands(model, "no_rope", heads=heads)}.items():
    print(f"{name}: {token_losses(model, tokens, hooks).mean():.3f} nats")
heads

# %% [markdown]
# ## Compose with your own hooks
#
# `attach` registers the measures as hooks. Any forward pass inside feeds them, beside hooks of your own: here all
# values of layer 0 are set to zero, and later layers are measured under that ablation.


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
# From a cache you already have, which holds what `needed_names` lists:

# %%
from tl_posgen.models import needed_names

_, cache = model.run_with_cache(tokens, names_filter=needed_names(model))
tl_posgen.analyze_cache(model, cache, tokens=tokens, measures="three_axis")["three_axis"].heads(3)

# %% [markdown]
# ## A measure of your own
#
# A collector, fed one layer of one prompt at a time and made anew for every model; and a declaration, which tables, figures
# and sentences read.

# %%
from tl_posgen import Collector, Measure, Variable
from tl_posgen.report.figures import head_map
from tl_posgen.report.sentences import beside


class MeanKeyShare(Collector):
    def update(self, layer):
        self.add(layer, share=layer.k.mean(1).square().sum(-1) / layer.k.square().sum(-1).mean(-1))


mean_key_share = Measure(
    name="mean_key_share",
    question="How much of a head's keys is their mean?",
    explanation="|E k|^2 / E |k|^2 of the keys before RoPE.",
    source="ours",
    collector=MeanKeyShare,
    variables={"share": Variable("mean key share", description="|E k|^2 / E |k|^2", headline="mean_key_share")},
    summarise=lambda data: {"share": float(data["share"].mean())},
    findings=lambda own, null: [f"Mean keys hold {beside(own, null, 'share', '.0%')} of the energy of keys."],
    figures={"map": head_map("share", title="Mean key share")},
)

share = mean_key_share(model, text, **cut)
print(*share.findings(), sep="\n")
share.plot()

# %% [markdown]
# ## Keep it
#
# `write` makes a page that opens with no network, `results.nc` and `summary.json`; `load` gives the report back.

# %%
report.write("report")
tl_posgen.load("report")
