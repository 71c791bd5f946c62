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
# # RoPE's planes: which does a model use, and why does it fail beyond its context?
#
# RoPE writes a query and a key as pairs of numbers, its planes, and turns each plane by a fixed angle per token of distance: the
# first planes by almost a radian, the last by a millionth. You see which planes heads use, what each costs, how far back the model
# reads, and what holding the slow planes changes.
#
# The outputs below are of SmolLM2 135M, from the file that `make real-models` gets. Where the environment variable `SMOLLM2` names
# neither that file nor "HuggingFaceTB/SmolLM2-135M-Instruct", the cells run on the bundled mini model.

# %%
import os

import tl_posgen
from tl_posgen.frequencies import Gap, PlaneUse
from tl_posgen.hooks import hold_planes
from tl_posgen.models import bundled_text

model = tl_posgen.load_model(os.environ.get("SMOLLM2", "mini"))
text = bundled_text()
cut = {"length": 256, "n_prompts": 4, "progress": False}
model.cfg.n_ctx

# %% [markdown]
# ## The clock
#
# A plane is used by a head as far as the head's queries and keys are long in it. In most heads one plane is longest: the one that
# makes about half a turn within the context. Its queries and keys stand a quarter turn apart, so that it adds -A sin(theta D) to
# the score: a penalty that grows with the distance D up to a quarter turn, and changes its sign beyond half a turn.

# %%
report = tl_posgen.analyze(model, text, measures=[PlaneUse()], **cut)
print(*report.findings(), sep="\n")
report["plane_use"].plot()

# %% [markdown]
# ## Beyond the context, in 256 tokens
#
# A long prompt costs much, and mixes what far tokens do with what they are. Here the second half of a short prompt stands S
# positions further on. If far text does harm, the loss of the second half rises above its loss without the first half. If far
# tokens are read, a second half that is a copy of the first costs little.
#
# The rule: slow planes turn up to half the context and no further. Nothing changes in a prompt of up to half the context.

# %%
context = model.cfg.n_ctx
gap = Gap(gaps=(0, context // 2, context, 3 * context // 2), rules=("hold_planes", "quarter_turns"))
gap = gap(model, text, nulls=0, **cut | {"n_prompts": 2})
gap.table().round(2)

# %%
gap.plot()

# %% [markdown]
# Harm and use are two things: with each plane at its quarter turn far text does no harm, and the copy is not read. Which planes have to
# be held, and where, is a question to each model.
#
# ## Generate under the rule
#
# `hold_planes` gives hooks as TransformerLens takes them. They compose with yours, and work with a KV cache.

# %%
hooks = hold_planes(model, "partial", at=model.cfg.n_ctx // 2)
prompt = "Alice was beginning to get very tired of"
with model.hooks(fwd_hooks=hooks):
    print(model.generate(prompt, max_new_tokens=12, do_sample=False, verbose=False))

# %% [markdown]
# ## Keep it

# %%
report.write("report-12")
