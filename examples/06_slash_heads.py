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
# A slash-dominant head attends a fixed distance back, whatever the text. You find them, test them on random tokens, take
# RoPE away, drop its frequencies in the running model, and watch gradient descent make one.
#
# The outputs below are of SmolLM2 135M, from the file that `make real-models` gets. Where the environment variable `SMOLLM2` names neither
# that file nor "HuggingFaceTB/SmolLM2-135M-Instruct", the cells run on the bundled mini model. SmolLM2 takes three minutes.

# %%
import os

import tl_posgen
from tl_posgen.models import bundled_text

model = tl_posgen.load_model(os.environ.get("SMOLLM2", "mini"))
text = bundled_text()
cut = {"length": 128, "n_prompts": 4, "progress": False}
model.cfg.n_layers, model.cfg.n_heads

# %% [markdown]
# Predict before you run a cell: a prediction that fails is what you remember. Each question stands before the cell that answers it.
#
# ## Find them
#
# *Predict:* how many of the heads attend to the token before, and in which layers do they stand?
#
# `score` is the mean attention along the D-th sub-diagonal, `ratio` the score over that of uniform attention.

# %%
tl_posgen.find_slash_heads(model, text, kappa=0.1, distances=range(5), **cut).head(12).round(3)

# %% [markdown]
# ## Everything about them, in one pass
#
# The measures are scores, the same heads on random tokens, their queries and keys ablated, and why they are of rank one. Each
# prompt goes through the model once for all that one pass can give.

# %%
from tl_posgen.slash import BandAblation, SlashTransfer

measures = ["slash", "slash_ablation", SlashTransfer(distances=(0, 1, 2)), "cone", BandAblation(schemes=["thirds"])]
report = tl_posgen.analyze(model, text, measures=measures, **cut)
print(*report.findings(), sep="\n")

# %%
report["slash"].plot()

# %% [markdown]
# ## Do they belong to the text or to the model?
#
# *Predict:* if tokens are drawn at random, does a previous-token head still look at the previous token? Which heads would not?

# %%
report["slash_transfer"].plot()

# %% [markdown]
# ## Is it only RoPE?
#
# *Predict:* take RoPE away in the head's layer, and every token's place with it: what is left? Put one query and one key, their means, in
# the place of all: is the slash gone, or better than before?
#
# Queries and keys of rank one, and their means, may have a *higher* score than the untouched head (SmolLM2's strongest: 0.852 and 0.910, 0.771
# untouched). That is no error. What tells tokens apart stands in the directions that were taken away; it pulls attention to keys that fit,
# off the diagonal. Without it each row attends where RoPE alone points.

# %%
report["slash_ablation"].plot()

# %% [markdown]
# ## Why: rank one, along the axis of a cone
#
# *Predict:* which keeps the slash: the part of the inputs that all tokens share, or the part that tells them apart? The slash score when
# nothing but the part along the shared axis enters W_Q and W_K:

# %%
report["cone"].plot("counterfactual")

# %% [markdown]
# ## Which frequencies: in the running model
#
# *Predict:* a head that looks one token back has to tell distance 1 from 0 and 2. Which planes turn far enough for that in one token, and
# what happens without the slow ones?

# %%
report["band_ablation"].plot()

# %% [markdown]
# Any ablation is a list of hooks, so you can run it beside your own, in the heads that you found; and, as a control, in as
# many others of the same layers:

# %%
from tl_posgen.hooks import ablate_bands
from tl_posgen.models import to_prompts
from tl_posgen.models.loss import token_losses

prompts = to_prompts(model, text, length=128, n_prompts=4)
of_heads = {"5 strongest": report.heads("slash", top=5)}
of_heads |= {f"5 others, seed {seed}": report.heads("slash", top=5, random=seed) for seed in range(3)}
for name, heads in of_heads.items():
    for kind in ("none", "means", "no_rope"):
        hooks = ablate_bands(model, kind, heads=heads)
        loss = sum(float(token_losses(model, prompt[None], hooks).mean()) for prompt in prompts) / len(prompts)
        print(f"{name}, {kind:7} {loss:.3f} nats")

# %% [markdown]
# ## Does gradient descent make one?
#
# A shallow transformer with RoPE learns to attend 3 tokens back, from data that can be explained in no other way. Seeds stand
# beside each other, features that it never saw are the test, and step 0 is the null.

# %%
from tl_posgen.slash import slash_toy

toy = slash_toy(distance=3, steps=200, batch=64, seeds=(0, 1), progress=False)
toy.frame().round(3)

# %%
toy.plot("training")

# %%
toy.plot("maps")

# %% [markdown]
# ## Exercises
#
# 1. `find_slash_heads(..., distances=[1])` gives previous-token heads alone. Ablate them with `ablate_heads(model, heads, how="mean")`,
#    and as many others, drawn at random. Is the rise of the loss that of previous-token heads, or of any heads?
# 2. A token that attends to itself has distance 0. Are those heads made by RoPE as well? Take RoPE away in them alone.
# 3. `slash_toy(planes="low")` keeps the slow third of the planes. Can gradient descent make a head that looks 3 tokens back without fast
#    planes? And 10 back, with `distance=10`?
# 4. Which head of your model changes most between text and random tokens? Look at it with `attention_examples`: what does it look for?

# %% [markdown]
# ## Keep it

# %%
report.write("report-06")
