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
# You load a model, measure it, read the table, look at the pictures, and hand the heads that you found to the next experiment.

# %% [markdown]
# ## Load a model, and see what it does with positions
#
# The outputs below are of SmolLM2 135M, from the file that `make real-models` gets. Where the environment variable `SMOLLM2` names neither
# that file nor "HuggingFaceTB/SmolLM2-135M-Instruct", the cells run on `"mini"`, which comes with the package. SmolLM2 takes two minutes.
#
# `check` reads each layer's geometry and proves it: the attention scores of a few tokens, recomputed from `q` and `k`, are compared with
# the model's own. `proof_error` is the largest difference.

# %%
import os

import tl_posgen

model = tl_posgen.load_model(os.environ.get("SMOLLM2", "mini"))
tl_posgen.check(model, printed=False).head(3)

# %% [markdown]
# ## Measure
#
# One forward pass per prompt feeds every measure; the same is done for a randomly initialised model of the same shape.

# %%
from tl_posgen.models import bundled_text

text = bundled_text()  # Alice's Adventures in Wonderland; the mini model was not trained on it
cut = {"length": 128, "n_prompts": 4, "progress": False}
report = tl_posgen.analyze(model, text, measures=["three_axis", "variance", "attention_examples", "slash"], **cut)
print(*report.findings(), sep="\n")

# %% [markdown]
# ## Read the table
#
# `r`: correlation of a head's scores with position + query + key. `r_within_rows`: the same within rows, which is all that
# softmax can see. Every number is also there without the first token, and every variable says what it is.

# %%
report["three_axis"].frame().round(3)

# %%
report["three_axis"].frame(tokens="without first").round(3)

# %%
report["three_axis"].sel(tokens="all")["r_within_rows"].attrs["description"]

# %%
r = report["three_axis"].numbers("r_within_rows", tokens="all")  # with its 95 % interval and random inits
print(f"r within rows: {r:.3f}")

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
# Token by token, with circuitsvis: the true pattern of the head closest to position + query + key, the pattern of that fit,
# and the difference.

# %%
report["attention_examples"].show()

# %% [markdown]
# ## From a finding to the next experiment
#
# `heads` gives the strongest heads of a measure; measures and interventions take them as they are. Here the strongest slash
# heads lose RoPE, and the loss says what it is worth to them. The controls: as many others of the same layers, drawn at
# random three times.

# %%
from tl_posgen.hooks import ablate_bands
from tl_posgen.models import to_prompts
from tl_posgen.models.loss import token_losses

prompts = to_prompts(model, text, length=128, n_prompts=4)
strongest = report.heads("slash", top=3)


def loss_without_rope(heads):
    hooks = ablate_bands(model, "no_rope", heads=heads) if len(heads) else []
    return sum(float(token_losses(model, prompt[None], hooks).mean()) for prompt in prompts) / len(prompts)


print(f"unchanged                   {loss_without_rope([]):.3f} nats")
print(f"without RoPE: 3 strongest   {loss_without_rope(strongest):.3f} nats")
for seed in range(3):
    print(f"without RoPE: 3 others      {loss_without_rope(report.heads('slash', top=3, random=seed)):.3f} nats")
strongest.round(3)

# %% [markdown]
# ## Keep it
#
# `write` makes a page that opens with no network, `results.nc` and `summary.json`; `load` gives the report back.

# %%
report.write("report-01")
print(tl_posgen.load("report-01"))
