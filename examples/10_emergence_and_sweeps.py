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
# # Over training, and over many models
#
# When does position appear? You measure every checkpoint of the mini model's training, then write a study of models, texts and
# measures, run it, and open its results as one xarray Dataset.

# %%
from pathlib import Path

import tl_posgen
from tl_posgen.models import bundled_text

text = bundled_text()
folder = Path(tl_posgen.__file__).parents[1] / "examples" / "mini_model" / "checkpoints"  # of a checkout
checkpoints = sorted(folder.iterdir())
print(*(path.name for path in checkpoints))

# %% [markdown]
# ## Measures over training
#
# For a model on the Hub: `emergence(["step0", "step512", "step143000"], text, model="EleutherAI/pythia-70m", ...)`.

# %%
cut = {"length": 64, "n_prompts": 4, "progress": False}
measures = ["three_axis", "variance", "slash"]
emerged = tl_posgen.emergence(checkpoints, text, tokenizer="mini", measures=measures, **cut)
print(*emerged.findings(), sep="\n")

# %% [markdown]
# Step 0 should give the numbers of the random init, which are the dotted lines:

# %%
emerged.plot("means")

# %%
emerged.plot("heads")

# %%
emerged.frame()[["checkpoint", "layer", "head", "three_axis_r_within_rows", "variance_position"]].tail(4).round(3)

# %% [markdown]
# ## A study
#
# A study is models x revisions x texts x measures. A job is one model at one revision on one text, and has one file. A sweep that
# was stopped resumes; the same dictionary may stand in a TOML file for `tl-posgen sweep`.

# %%
study = {
    "name": "small",
    "models": [
        "mini",  # or a name on huggingface.co: "EleutherAI/pythia-70m"
        {"name": str(folder), "label": "training", "revisions": ["step00000", "step00500"], "tokenizer": "mini"},
    ],
    "length": 64,
    "n_prompts": 4,
    "measures": ["three_axis", "variance", "loss"],
}
tl_posgen.sweep(study, out="runs", progress=False)

# %% [markdown]
# One dataset with labelled dims; models and revisions that were not asked for together are NaN:

# %%
data = tl_posgen.open_study("runs")
r = data["three_axis_r_within_rows"].sel(group="all", tokens="all").mean(("layer", "head", "text"))
r.sel(init="trained").to_series().dropna().round(3)

# %% [markdown]
# The same for the random inits, by their seeds:

# %%
r.sel(init="0").to_series().dropna().round(3)

# %% [markdown]
# ## Keep it

# %%
report = tl_posgen.report_study("runs")
report.write("report-10")
report["study"].plot()
