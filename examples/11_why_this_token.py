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
# # Why does this head attend there?
#
# One prompt, one head, one token that attends. Each of its attention scores is a sum of four terms: position (query and
# distance), the key alone, query and key together, and what needs query, key and distance. Each term is a sum over RoPE planes,
# and over the components of the model that wrote the key. All sums are exact: they give the model's own scores.
#
# What comes out: a previous-token head of mini finds the token before by one vector that the first MLP adds to every token. Without that
# vector in its keys, its attention to the token before falls from 0.33 to 0.06; without a random vector of the same length it stays at 0.33.

# %%
import tl_posgen

model = tl_posgen.load_model("mini")  # or a name on huggingface.co: "EleutherAI/pythia-70m"
prompt = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do"
explanation = tl_posgen.explain(model, prompt, head="L3H1", query=-1)
explanation.table().head(6).round(2)

# %% [markdown]
# L3H1 looks at the token before. Softmax sees only how the scores of a query differ, so the mean score of
# the other keys is taken from each. A sharper question is why the head attends to one token and not to another: with `against`, the
# score of that other token is taken away instead.

# %%
explanation = tl_posgen.explain(model, prompt, head="L3H1", query=-1, against=-3)
explanation.plot()

# %% [markdown]
# Position depends on the query and the distance, with the mean key in the place of the key. The mean key is that of another
# text, the bundled book unless you give one, because a mean over the prompt would contain what is to be explained.

# %%
print(explanation.trained.attrs["reference"])
explanation.show()

# %% [markdown]
# ## Is it so?
#
# The sum is exact, but which of its terms matter? `check` deletes the largest terms in the running model and, for comparison,
# randomly drawn terms whose absolute values have the same sum.

# %%
explanation.check(n=10).round(3)

# %% [markdown]
# `attention` and `prediction` are changes. The largest terms change the attention more than drawn ones do; the
# prediction does not tell the two apart.
#
# ## The planes, and who wrote the key
#
# RoPE turns pairs of coordinates, its planes. The fast ones (low numbers) tell neighbours apart.

# %%
key = explanation.key
planes = explanation.frame(by=("term", "plane"), key=key)
planes.pivot(index="plane", columns="term", values="contribution").round(2).head(8)

# %% [markdown]
# The key is a sum too: of what the embedding, earlier heads and MLPs wrote into the residual stream.

# %%
explanation.largest(8, key=key, by=("term", "source")).round(2)

# %% [markdown]
# Terms of opposite sign cancel, so two large terms need not be two reasons. Look at `frame(by=("term",))` first, which sums over
# sources.
#
# ## The same head without training
#
# In a randomly initialised model of the same shape attention is nearly uniform, and the terms are small.

# %%
random = tl_posgen.random_like(model, seed=0)
tl_posgen.explain(random, prompt, head="L3H1", query=-1, against=-3).table().head(3).round(2)

# %% [markdown]
# ## As tables, and as hooks
#
# `split` gives the terms of all queries and keys. `patch_parts` gives the head the position or the content of another prompt, and
# `ablate_heads` removes the head. What does each do to the loss of this prompt?

# %%
from tl_posgen.hooks import ablate_heads, patch_parts
from tl_posgen.models.loss import token_losses

parts = tl_posgen.split(model, prompt, heads="L3H1")
print({name: round(float(parts[name].sel(head=1, query=27, key=26)), 2) for name in parts.data_vars})

tokens = model.to_tokens(prompt)
other = "Down, down, down. Would the fall never come to an end? I wonder how many miles she had fallen by this time?"
donor = model.to_tokens(other)[0, : tokens.shape[1]]
conditions = {
    "untouched": [],
    "position of another prompt": patch_parts(model, donor, ["position"], heads="L3H1"),
    "content of another prompt": patch_parts(model, donor, ["content"], heads="L3H1"),
    "without the head": ablate_heads(model, "L3H1", how="mean"),
}
for name, hooks in conditions.items():
    print(f"{name:28} {token_losses(model, tokens, hooks).mean():.3f} nats")

# %% [markdown]
# ## Who writes the position, and what is left without it
#
# Position needs the mean key, what the keys of all tokens have in common. Which component writes it? The measure `sources` gives
# each component's share of the position part over a text, a row a layer, beside a randomly initialised model.

# %%
from tl_posgen.models import bundled_text
from tl_posgen.sources import Sources

written = Sources()(model, bundled_text(), length=128, n_prompts=4, progress=False)
print(*written.findings(), sep="\n")
written.plot()

# %% [markdown]
# In layer 1 it is the first MLP. Its constant is its mean over tokens, one vector for all. `remove_source` takes it out of the
# keys of one head, and the head no longer finds the token before. The control takes out a vector of the same length with random
# phases.

# %%
earlier = {}
for name, control in {"untouched": None, "without its constant": False, "control": True}.items():
    hooks = [] if control is None else tl_posgen.hooks.remove_source(model, "L0 MLP", heads="L1H3", control=control)
    with model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(tokens)
    earlier[name] = round(float(cache["pattern", 1][0, 3].diagonal(-1)[1:].mean()), 3)
print("mean attention of L1H3 to the token before:", earlier)

# %% [markdown]
# ## Keep it
#
# A page with both pictures, and a file that gives the explanation back without the model:
# `tl_posgen.load("report-11")["explanation"]`.

# %%
explanation.write("report-11")
