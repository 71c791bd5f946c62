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
# # Head profiles: what kind of head is it, and what goes together?
#
# One table over position generalisation and slash-dominant heads: a row a head. You read it, correlate its columns beside random
# init, ask where the interaction comes from, and cut keys towards rank one in the running model.

# %%
import tl_posgen
from tl_posgen.models import bundled_text

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
text = bundled_text()
cut = {"length": 128, "n_prompts": 4, "progress": False}
model.cfg.n_layers, model.cfg.n_heads

# %% [markdown]
# ## The table
#
# Rank and constancy of Q and K, interaction, slash; attention on repeated random tokens; what the model loses without the head's
# interaction, its slash, or the head.

# %%
report = tl_posgen.analyze(model, text, measures=["profiles", "plane_interaction"], **cut)
profiles = report["profiles"]
profiles.frame().round(3)

# %% [markdown]
# Every head's rank in each column; hovering shows the number:

# %%
profiles.plot("heads")

# %% [markdown]
# ## What goes together, and what does at random initialisation too?
#
# Below the diagonal over all heads, above it within layers; the second map is random init. Only what differs from it was learned.

# %%
profiles.plot("correlations")

# %%
print(*profiles.findings(), sep="\n")

# %% [markdown]
# ## Where the interaction comes from
#
# It is a covariance of RoPE's planes. What orders the heads?

# %%
report["plane_interaction"].plot("heads")

# %%
report["plane_interaction"].plot("matrix")

# %% [markdown]
# ## Cut the keys
#
# Each key keeps its part along the head's mean key and a share of the rest; the control is a random direction that takes as much
# energy.

# %%
from tl_posgen.joining import KeyCut

result = KeyCut(shares=[0, 0.5, 1], controls=2)(model, text, **cut)
print(*result.findings(), sep="\n")

# %%
result.plot()

# %% [markdown]
# As hooks, in the heads that you found, beside your own. The control cuts as much energy along a random direction:

# %%
from tl_posgen.joining import cut_keys
from tl_posgen.models import to_prompts
from tl_posgen.models.loss import token_losses

tokens = to_prompts(model, text, length=128, n_prompts=1)[0][None]
heads = profiles.heads(top=3, by="slash_score")
for name, options in {"whole": {"share": 1}, "cut": {"share": 0}, "control": {"share": 0, "control": True}}.items():
    hooks = cut_keys(model, heads=heads, **options)
    print(f"keys {name:8} {token_losses(model, tokens, hooks).mean():.3f} nats")

# %% [markdown]
# ## Keep it

# %%
report.write("report-06")
