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
# A high correlation of the scores with position + content is not yet a mechanism. Here the scores of the running model are
# replaced, and the loss says what it runs on.

# %%
import tl_posgen
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import Substitution

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
text = bundled_text()
cut = {"length": 128, "n_prompts": 4, "progress": False}
model.cfg.n_layers, model.cfg.n_heads

# %% [markdown]
# ## Replace every score
#
# `recovered` is the share of the way from uniform attention (0) to the untouched model (1). Beside it stands `r`, the
# correlation of the replacement with the true scores: they do not rank the replacements alike.

# %%
replaced = Substitution()(model, text, **cut)
replaced.table().round(3)

# %% [markdown]
# The same of the random init, whose loss no attention changes:

# %%
replaced.table("random init").round(3)

# %%
print(*replaced.findings(), sep="\n")

# %%
replaced.plot("correlation")

# %% [markdown]
# ## One hook at a time
#
# A split that is best for the distances 0 to 7, in all heads, then in layer 0 alone; and the null, uniform attention.

# %%
from tl_posgen.position import by_constant, by_split, substitute, triangle

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
# The change of each token's loss where all scores are replaced: red where the model loses, blue where it gains.

# %%
replaced.show()

# %% [markdown]
# ## Scores beside their two parts
#
# A few heads, each above the same one of the random init: scores within rows, their position part, their content part.

# %%
examples = tl_posgen.analyze(model, text, measures=["three_axis", "split_examples"], **cut)
examples["split_examples"].plot()

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({replaced.name: replaced}, replaced.provenance).write("report-03")
