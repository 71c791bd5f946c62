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
# # Dummy distance and word order
#
# First every pair of tokens is given another distance than its own. Then tokens, positions and features are swapped. If scores
# are position + content, the content part should stay as it is.

# %%
import tl_posgen
from tl_posgen.hooks import at_dummy_distance
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import DummyDistance, Perturbation

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
text = bundled_text()
cut = {"length": 128, "n_prompts": 4, "progress": False}
tokens = to_prompts(model, text, length=128, n_prompts=1)[0][None]
tokens.shape

# %% [markdown]
# ## Control the distance
#
# All pairs get one distance, in every head; or distances above a limit become the limit. In the last row, the null, every pair
# keeps its own distance.

# %%
for name, hooks in {
    "all at 0": at_dummy_distance(model, distance=0),
    "all at 64": at_dummy_distance(model, distance=64),
    "8 at most": at_dummy_distance(model, beyond=8),
    "its own": at_dummy_distance(model, distance=lambda d: d),
}.items():
    print(f"{name:9} {token_losses(model, tokens, hooks).mean():.3f} nats")

# %% [markdown]
# ## What stays?
#
# The key part c(j) of the three-axis fit is fitted twice: at the true distances, and with all pairs at one distance. Do the two
# agree? The random init stands beside them.

# %%
controlled = DummyDistance(distances=(0, 16, 64), limits=(1, 8, 64))(model, text, **cut)
print(*controlled.findings(), sep="\n")

# %%
controlled.plot("agreement")

# %%
controlled.plot("curves")

# %% [markdown]
# ## Disturb the order
#
# Swapped are tokens, the positions of queries and keys, or the positions in the position part alone; the swaps are the same.
# `n_cloze` would add the accuracy in a cloze made from the text.

# %%
disturbed = Perturbation(
    ratios=(0.0, 0.05, 0.5),
    conditions=("tokens", "positions", "position_part"),
    reaches=("uniform",),
    n_cloze=0,
)(model, text, **cut)
print(*disturbed.findings(), sep="\n")

# %%
disturbed.plot()

# %% [markdown]
# Which tokens' loss rises?

# %%
disturbed.show()

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({result.name: result for result in (controlled, disturbed)}, controlled.provenance).write("report-05")
