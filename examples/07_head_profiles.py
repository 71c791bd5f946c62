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
# One table covers position generalisation and slash-dominant heads, with a row for each head. You read it, and set two of its columns against each
# other beside random init.

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
# ## Keep it

# %%
report.write("report-07")
