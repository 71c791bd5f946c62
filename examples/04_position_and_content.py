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
# Scores that correlate with position + content do not show that the model uses this sum. Here all scores of the running model
# are replaced by such a sum, and the loss says whether it still works.

# %%
import pandas as pd

import tl_posgen
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import Substitution

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
text = bundled_text()
pd.options.display.precision = 3
cut = {"length": 128, "n_prompts": 4, "progress": False}
model.cfg.n_layers, model.cfg.n_heads

# %% [markdown]
# ## Replace every score
#
# `recovered` is 0 for uniform attention and 1 for the untouched model. `r` is the correlation of the replacement with the true
# scores. The two order the replacements differently.

# %%
replaced = Substitution()(model, text, **cut)
replaced.table()

# %% [markdown]
# The same for the random init. No change of its attention changes its loss:

# %%
replaced.table("random init")

# %%
print(*replaced.findings(), sep="\n")

# %%
replaced.plot("correlation")

# %% [markdown]
# ## One hook at a time
#
# A split made for the distances 0 to 7 replaces the scores of all heads, then those of layer 0 alone. The null is uniform
# attention.

# %%
from tl_posgen.hooks import by_constant, by_split, substitute, triangle

tokens = to_prompts(model, text, length=128, n_prompts=2)
tokens = tokens[0][None]
split = by_split(triangle(8))
for name, hooks in {
    "untouched": [],
    "split, all heads": substitute(model, split),
    "split, layer 0 alone": substitute(model, split, layers=[0]),
    "uniform, all heads": substitute(model, by_constant),
    "uniform, layer 0 alone": substitute(model, by_constant, layers=[0]),
}.items():
    print(f"{name:23} {token_losses(model, tokens, hooks).mean():.3f} nats")

# %% [markdown]
# ## Which tokens pay?
#
# The change of each token's loss when all scores are replaced: red where the loss rises, blue where it falls.

# %%
replaced.show()

# %% [markdown]
# ## Scores beside their two parts
#
# Scores of a few heads, their position part and their content part, each less the mean of its row. Below each head stands the
# same head of the random init.

# %%
examples = tl_posgen.analyze(model, text, measures=["three_axis", "split_examples"], **cut)
examples["split_examples"].plot()

# %% [markdown]
# ## The three curves
#
# The narrowest sum has a curve for each place alone: $a$(distance) + $b$(query) + $c$(key). It knows no token, so what it fits is position.
# $a$ falls where a head prefers near keys, and has a peak where it looks a fixed distance back. $b$ adds the same number to all scores of a
# query, so softmax does not see it. $c$ is high at the first key where a head has a sink. As the distance is query less key, a slope can be
# moved from one curve to the others without changing the sum: the picture makes $c$ flat, and only bends and peaks have a meaning. Grey is
# the random init.

# %%
examples["three_axis"].plot("curves")

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({replaced.name: replaced}, replaced.provenance).write("report-04")
