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
# You load a model, measure it, read the table, look at the pictures, and compose the hooks with your own.
# It runs in a minute on the mini model that comes with the package.

# %%
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
table = tl_posgen.check(model)

# %% [markdown]
# ## Measure
#
# One forward pass per prompt feeds every analyzer; the same is done for a randomly initialised model of the same shape.

# %%
from tl_posgen.models.tokens import bundled_text

text = bundled_text()  # Alice's Adventures in Wonderland; the mini model was not trained on it
report = tl_posgen.analyze(model, text, length=256, n_prompts=4)
report

# %% [markdown]
# ## Read the table
#
# `r`: correlation of a head's scores with position + row + key. `r_visible`: the same within rows, which is all that
# softmax can see. `r_no_first`: the first token left out.

# %%
report["three_axis"].frame().round(3)

# %%
trained, null = report.frame().mean(), report.frame(null=True).mean()
print(f"r within rows: trained {trained.three_axis_r_visible:.3f}, random init {null.three_axis_r_visible:.3f}")

# %% [markdown]
# ## Look
#
# Each picture says which model it shows and draws the null beside it.

# %%
report["three_axis"].plot()

# %%
report["variance"].plot()

# %%
report["three_axis"].plot(kind="curves")

# %% [markdown]
# Token by token, with circuitsvis: the true pattern of the most position-driven head, the pattern of its additive fit,
# and the difference.

# %%
report["attention_examples"].show()

# %% [markdown]
# ## Compose with your own hooks
#
# `attach` registers the analyzers as hooks. Any forward pass inside feeds them, beside hooks of your own: here all
# values of layer 0 are set to zero, and later layers are measured under that ablation.

# %%
from tl_posgen import ThreeAxis


def zero_values(value, hook):
    return torch.zeros_like(value)


tokens = model.to_tokens(text[:2000])[:, :256]
with tl_posgen.attach(model, [ThreeAxis()]) as run:
    model(tokens)
intact = run.report()["three_axis"].frame()

with tl_posgen.attach(model, [ThreeAxis()]) as run:
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_v", zero_values)])
ablated = run.report()["three_axis"].frame()

print((ablated.r_visible - intact.r_visible).groupby(intact.layer).mean().round(3))

# %% [markdown]
# From a cache you already have:

# %%
from tl_posgen.models.cache import needed_names

_, cache = model.run_with_cache(tokens, names_filter=needed_names(model))
tl_posgen.analyze_cache(model, cache)["three_axis"].frame().head()

# %% [markdown]
# ## Your own analyzer
#
# Ten lines: a name, what it needs, `update`, `result`.

# %%
import xarray as xr


class QueryNorm:
    name, needs = "query_norm", frozenset()

    def __init__(self):
        self.rows = {}

    def update(self, capture):
        self.rows[capture.layer] = capture.q.norm(dim=-1).mean(dim=1).cpu()

    def result(self):
        norms = torch.stack(list(self.rows.values())).numpy()
        return xr.Dataset(
            {"query_norm": (("layer", "head"), norms)}, {"layer": list(self.rows), "head": range(norms.shape[1])}
        )


tl_posgen.analyze(model, text, length=128, n_prompts=1, analyzers=[QueryNorm()])["query_norm"].plot()

# %% [markdown]
# ## Keep it
#
# `write` makes a page that opens with no network, `results.nc` (read it back with `tl_posgen.load`) and `summary.json`.

# %%
report.write("report")
