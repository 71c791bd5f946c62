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
# # Does the model run on position + content?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tl-posgen/tl_posgen/blob/main/examples/02_position_and_content.ipynb)
#
# A high correlation of the scores with position + content is not yet a mechanism. Here the scores of the running model
# are replaced, and the loss says what it runs on. Everything is a TransformerLens hook, so it composes with yours.

# %%
# The published package; in a checkout, install that instead.
# %pip install --quiet tl-posgen

# %%
import tl_posgen
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import dummy_distance, perturbation, substitution

model = tl_posgen.load_model("mini")
text = bundled_text()
cut = {"length": 128, "n_prompts": 2}

# %% [markdown]
# ## Replace every score
#
# `recovered` is the share of the way from uniform attention (0) to the untouched model (1). Beside it stands `r`, the
# correlation of the replacement with the true scores: they do not rank the replacements alike.

# %%
replaced = substitution(model, text, search=False, **cut)
replaced.table().round(3)

# %%
replaced.plot("correlation")

# %% [markdown]
# ## One hook at a time
#
# The same, by hand: a split that is best for the distances 0 to 7 in all heads, then in layer 0 alone.

# %%
from tl_posgen.position import by_split, substitute, triangle

tokens = to_prompts(model, text, **cut)[0][None]
print("untouched     ", round(token_losses(model, tokens).mean().item(), 3))
print("all heads     ", round(token_losses(model, tokens, substitute(model, by_split(triangle(8)))).mean().item(), 3))
hooks = substitute(model, by_split(triangle(8)), layers=[0])
print("layer 0 alone ", round(token_losses(model, tokens, hooks).mean().item(), 3))

# %% [markdown]
# ## Control the distance
#
# Every pair of every head sees one distance, or no more than a limit. The key part of the scores would stay as it is if
# position and content were apart.

# %%
from tl_posgen.position import at_dummy_distance

for options in ({"distance": 0}, {"distance": 64}, {"beyond": 8}):
    hooks = at_dummy_distance(model, **options)
    print(options, round(token_losses(model, tokens, hooks).mean().item(), 3))

# %%
controlled = dummy_distance(model, text, distances=(0, 16, 64), limits=(1, 8, 64), **cut)
controlled.plot()

# %% [markdown]
# ## Disturb the order
#
# Tokens, positions of queries and keys, or the position part alone; the same swaps under every condition. `n_cloze` adds
# the accuracy in a cloze made from the text.

# %%
disturbed = perturbation(
    model,
    text,
    ratios=(0.0, 0.05, 0.5),
    conditions=("tokens", "positions", "position_part"),
    reaches=("uniform",),
    n_cloze=0,
    **cut,
)
disturbed.plot()

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

results = {result.name: result for result in (replaced, controlled, disturbed)}
Report(results, replaced.provenance).write("report")
