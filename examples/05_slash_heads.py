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
# # Slash-dominant heads: which, and why?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tl-posgen/tl_posgen/blob/main/examples/03_slash_heads.ipynb)
#
# A slash-dominant head attends a fixed distance back, whatever the text. You find them, test them on random tokens, take
# RoPE away, and drop its frequencies in the running model.

# %%
# The published package; in a checkout, install that instead.
# %pip install --quiet tl-posgen

# %%
import tl_posgen
from tl_posgen.models import bundled_text

model = tl_posgen.load_model("mini")
text = bundled_text()
cut = {"length": 128, "n_prompts": 2}

# %% [markdown]
# ## Find them
#
# Score: mean attention along the D-th sub-diagonal; ratio: over that of uniform attention.

# %%
tl_posgen.find_slash_heads(model, text, kappa=0.1, distances=range(5), **cut).round(3)

# %% [markdown]
# ## Everything about them, in one pass
#
# Scores, the same heads on random tokens, their queries and keys ablated, why they are of rank one: each prompt goes through
# the model once for all that one pass can give.

# %%
from tl_posgen.slash import BandAblation

measures = ["slash", "slash_ablation", "slash_transfer", "cone", BandAblation(schemes=["thirds"])]
report = tl_posgen.analyze(model, text, measures=measures, **cut)
print(*report.findings(), sep="\n")

# %%
report["slash"].plot()

# %% [markdown]
# ## Do they belong to the text or to the model?

# %%
report["slash_transfer"].plot()

# %% [markdown]
# The strongest heads token by token, on the text and on random tokens:

# %%
report["slash_transfer"].show()

# %% [markdown]
# ## Is it only RoPE?

# %%
report["slash_ablation"].plot()

# %% [markdown]
# ## Why: rank one, along the axis of a cone
#
# The slash score when nothing but the part along the shared axis enters W_Q and W_K:

# %%
report["cone"].plot("counterfactual")

# %% [markdown]
# ## Which frequencies: in the running model

# %%
report["band_ablation"].plot()

# %% [markdown]
# Any ablation is a list of hooks, so you can run it beside your own, in the heads that you found:

# %%
from tl_posgen.models import to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.slash import ablate_bands

heads = report.heads("slash", top=5)
tokens = to_prompts(model, text, **cut)[0][None]
for kind in ("none", "means", "no_rope"):
    print(kind, round(token_losses(model, tokens, ablate_bands(model, kind, heads=heads)).mean().item(), 3))

# %% [markdown]
# ## Keep it

# %%
report.write("report")
