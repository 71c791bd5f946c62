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
# # Head profiles: what kind of head is it?
#
# One table covers position generalisation and slash-dominant heads, with a row for each head. You read it, set two of its columns against each
# other beside random init, and cut keys towards rank one in the running model.

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
# The columns are rank and constancy of Q and K, interaction, slash score, and attention on repeated random tokens.

# %%
report = tl_posgen.analyze(model, text, measures=["profiles"], **cut)
profiles = report["profiles"]
profiles.frame().round(3)

# %%
print(*profiles.findings(), sep="\n")

# %% [markdown]
# ## Two columns, and random init
#
# Heads whose keys are near rank one before RoPE have a higher slash score. Only what differs from random init was learned.

# %%
profiles.plot()

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
