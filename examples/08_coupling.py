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
# Residual Jacobians of every block at the last token say how far their top singular vectors agree. You also see how straight
# tokens move through the model, and how their norms grow, beside random bases and a randomly initialised model.

# %%
import tl_posgen
from tl_posgen.coupling import Coupling
from tl_posgen.models import bundled_text, to_prompts

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
result = Coupling(k=10)(model, bundled_text(), length=64, n_prompts=4, progress=False)
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
# Jacobians and their numbers are plain objects, which need no model.

# %%
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.coupling.numbers.overlap import alignment

tokens = to_prompts(model, bundled_text(), length=64, n_prompts=1)[0]
for name, each_model in {"mini": model, "random init": tl_posgen.random_like(model, seed=0)}.items():
    first, second = residual_jacobians(each_model, tokens, source=63, layers=[1, 2])
    lower, upper = first.triplets(10), second.triplets(10)
    overlap = alignment(upper.left, first.matvec(upper.right)).abs()
    values = " ".join(f"{value:.2f}" for value in lower.values[:3])
    diagonal = " ".join(f"{value:.2f}" for value in overlap.diagonal()[:3])
    print(f"{name:11}  singular values {values}  |diagonal of A| {diagonal}")

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({"coupling": result}, result.provenance).write("report-08")
