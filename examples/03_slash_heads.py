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
# %pip install --quiet tl-posgen

# %%
import tl_posgen
from tl_posgen.experiments import band_ablation, cone, slash_transfer
from tl_posgen.models.tokens import bundled_text

model = tl_posgen.load_model("mini")
text = bundled_text()
cut = {"length": 128, "n_prompts": 2}

# %% [markdown]
# ## Find them
#
# Score: mean attention along the D-th sub-diagonal; ratio: over that of uniform attention.

# %%
tl_posgen.find_slash_heads(model, text, kappa=0.1, distances=range(5), **cut).round(3)

# %%
report = tl_posgen.analyze(model, text, analyzers=["slash", "slash_planes"], examples=0, **cut)
report["slash"].plot()

# %% [markdown]
# ## Do they belong to the text or to the model?
#
# The same heads on uniform random tokens, and with parts of their queries and keys taken away.

# %%
transfer = slash_transfer(model, text, **cut)
transfer.plot()

# %% [markdown]
# The strongest heads token by token, on the text and on random tokens:

# %%
transfer.show()

# %%
transfer.plot(kind="ablations")

# %% [markdown]
# ## Why: rank one, along the axis of a cone
#
# `axis only`: the slash score when nothing but the part along the shared axis enters W_Q and W_K.

# %%
from tl_posgen.report.findings import findings

why = cone(model, text, **cut)
print(*findings({"cone": why}), sep="\n")

# %%
why.plot(kind="counterfactual")

# %% [markdown]
# ## Which frequencies: in the running model

# %%
bands = band_ablation(model, text, splits=["thirds"], **cut)
bands.plot()

# %% [markdown]
# Any ablation is a list of hooks, so you can run it beside your own:

# %%
from tl_posgen.experiments.loss import token_losses
from tl_posgen.interventions import ablate_bands
from tl_posgen.models.tokens import to_prompts

tokens = to_prompts(model, text, **cut)[0][None]
for kind in ("none", "means", "no_rope"):
    print(kind, round(token_losses(model, tokens, ablate_bands(model, kind)).mean().item(), 3))

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

results = report.results | {result.name: result for result in (transfer, why, bands)}
Report(results, report.provenance).write("report")
