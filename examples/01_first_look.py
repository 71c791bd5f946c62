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
report = tl_posgen.analyze(model, text, measures=["variance", "slash", "three_axis", "attention_examples"], **cut)
print(*report.findings(), sep="\n")

# %% [markdown]
# ## Read the table
#
# A row a head. Every query meets every key at every distance, and the variance of these scores, as far as softmax sees it, has three
# shares that sum to 1: *position* depends on the distance (and the query), *content* on the key (and the query), *interaction* needs both
# at once. `additive_r` is the root of position + content: the correlation with the best sum of the two. Shares of scores that hardly vary
# say little, so look at `size`, in logits, too. The first token is left out.

# %%
report["variance"].frame().round(3)

# %%
interaction = report["variance"].numbers("interaction")  # with its 95 % interval and null models
print(f"interaction: {interaction:.3f}")

# %%
report["variance"].trained["interaction"].attrs["description"]

# %% [markdown]
# ## Look
#
# Each picture says which model it shows and draws the null models beside it, told apart by their shape. `kinds` lists what there is.
# Here each point is a head: heads at the top attend by position, heads at the left by content.

# %%
print(report["variance"].kinds, report["slash"].kinds)
report["variance"].plot()

# %% [markdown]
# Which heads attend a fixed distance back? The slash score is the mean attention that a head pays so many tokens back; 1 is the previous
# token.

# %%
report["slash"].plot("map")

# %% [markdown]
# Token by token, with circuitsvis: the true pattern of a head, the pattern of a sum of three curves, one over distances, one over queries
# and one over keys (notebook 04 explains them), and the difference. The head is the one that such a sum fits best.

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
