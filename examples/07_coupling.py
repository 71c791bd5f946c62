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
# # Do the blocks of a model act along the same directions?
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/tl-posgen/tl_posgen/blob/main/examples/04_coupling.ipynb)
#
# Residual Jacobians of every block at the last token: how far their top singular vectors agree, how straight tokens move
# through the model, and how their norms grow. Always beside random bases and a randomly initialised model.

# %%
# The published package; in a checkout, install that instead.
# %pip install --quiet tl-posgen

# %%
import tl_posgen
from tl_posgen.coupling import coupling
from tl_posgen.models import bundled_text, to_prompts

model = tl_posgen.load_model("mini")
result = coupling(model, bundled_text(), length=64, n_prompts=4, k=10)
print(*result.findings(), sep="\n")

# %%
result.table()

# %%
result.plot()

# %%
result.plot("trajectories")

# %%
result.plot("growth")

# %% [markdown]
# ## The numbers by themselves
#
# Jacobians are plain objects; so are the numbers, which know no model.

# %%
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.coupling.overlap import alignment

tokens = to_prompts(model, bundled_text(), length=64, n_prompts=1)[0]
first, second = residual_jacobians(model, tokens, source=63, layers=[1, 2])
lower, upper = first.triplets(10), second.triplets(10)
overlap = alignment(upper.left, first.matvec(upper.right)).abs()
print(overlap.shape, "diagonal", overlap.diagonal()[:3].tolist(), "singular values", lower.values[:3].tolist())

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({"coupling": result}, result.provenance).write("report")
