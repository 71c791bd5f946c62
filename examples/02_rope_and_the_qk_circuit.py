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
# # RoPE and the QK circuit
#
# Without RoPE a head has one QK circuit, $W_Q W_K^\top$: what a query asks for, whatever the distance. With RoPE it has one for
# each distance. This notebook takes them apart by hand, with TransformerLens and a few lines of torch, and shows where the library's
# terms come from.

# %%
import math

import plotly.graph_objects as go
import torch

import tl_posgen
from tl_posgen.models import bundled_text, to_prompts

model = tl_posgen.load_model("mini")  # 4 layers of 4 heads, bundled, trained on other public-domain books
layer, head, n = 1, 3, 128
tokens = to_prompts(model, bundled_text(), length=n, n_prompts=1)[0][None]
_, cache = model.run_with_cache(tokens)
q = cache["q", layer][0, :, head].double()  # [query, d_head], before RoPE
k = cache["k", layer][0, :, head * model.cfg.n_key_value_heads // model.cfg.n_heads].double()  # heads share keys here
q.shape, k.shape

# %% [markdown]
# ## Planes
#
# RoPE pairs coordinate $m$ with $m + d/2$, and turns plane $m$ by $\theta_m = 10000^{-2m/d}$ radians per token. Written as
# complex numbers $z_m$, a query at position $i$ and a key at $j$ have the score
#
# $$W_{ij} = \frac{1}{\sqrt d}\, \mathrm{Re} \sum_m z^q_m\, \overline{z^k_m}\; e^{i \theta_m (i - j)}.$$

# %%
half = model.cfg.d_head // 2
theta = 10_000.0 ** (-torch.arange(half) / half)
zq, zk = torch.complex(q[:, :half], q[:, half:]), torch.complex(k[:, :half], k[:, half:])


def score(i, j, distance):
    """The score of query i and key j as if they stood this far apart."""
    turn = torch.polar(torch.ones(half), theta * distance)
    return float((zq[i] * zk[j].conj() * turn).sum().real) / math.sqrt(model.cfg.d_head)


scores = cache["attn_scores", layer][0, head]
for i, j in ((20, 19), (60, 3), (100, 100)):
    print(f"query {i:3}, key {j:3}: by hand {score(i, j, i - j):7.4f}, the model's {scores[i, j]:7.4f}")

# %% [markdown]
# ## One pair at every distance
#
# The same query and key, moved apart: this is what a change of position alone does. Fast planes make the ripples near 0, slow ones
# the level far away.

# %%
i, distances = 60, list(range(64))
figure = go.Figure()
for j in (59, 58, 40):
    words = " → ".join(model.tokenizer.decode(tokens[0, place]).strip() for place in (i, j))
    figure.add_scatter(x=distances, y=[score(i, j, d) for d in distances], name=f"{words} (stands {i - j} back)")
figure.update_layout(title="Score of a query with three keys, at every distance", template="simple_white")
figure.update_xaxes(title="distance, tokens")
figure.update_yaxes(title="score")

# %% [markdown]
# ## A QK circuit for every distance
#
# In terms of the residual stream $W_{ij} = x_i\, M(d)\, x_j^\top$ with $M(d) = W_Q R(d) W_K^\top / \sqrt d$. How far is $M(d)$ the matrix of
# distance 0? The cosine falls within a few tokens, and does not fall to zero: slow planes hardly turn.

# %%
W_Q, W_K = (weights[layer, head].detach().double() for weights in (model.W_Q, model.W_K))


def circuit(distance):
    """M(d) [d_model of the query, d_model of the key]."""
    cos, sin = torch.cos(theta * distance).double(), torch.sin(theta * distance).double()
    rotated = torch.cat([W_Q[:, :half] * cos - W_Q[:, half:] * sin, W_Q[:, :half] * sin + W_Q[:, half:] * cos], 1)
    return rotated @ W_K.T / math.sqrt(model.cfg.d_head)


def cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))


print({d: round(cosine(circuit(0), circuit(d)), 2) for d in (0, 1, 2, 4, 8, 16, 32, 64)})

# %% [markdown]
# ## Content: the circuit at no distance in particular
#
# The mean of $M(d)$ over distances is what the head matches whatever the distance. Planes that turn fast cancel in it; how much of
# each plane is left is $|\mathbb{E}_d\, e^{i \theta_m d}|$.

# %%
mean_turn = torch.polar(torch.ones(n, half), theta * torch.arange(n)[:, None]).mean(0)
print("left of each plane:", [round(value, 2) for value in mean_turn.abs().tolist()])

# %% [markdown]
# ## Position: a key that is always there
#
# Averages of keys over a text are not zero. With the mean key $\bar k$ in the place of every key, a score depends on the query and the
# distance alone: that is position. What the key deviates by, at the mean turn, is content; the rest is interaction.
# The library's `split` does this with the mean key of another text.

# %%
parts = tl_posgen.split(model, tokens[0], heads=[(layer, head)]).isel(head=0)
earlier = torch.ones(n, n).tril(-1).bool().numpy()
earlier[:, 0] = False  # the first token is left out, as its key is unlike all others
for name in ("position", "content", "interaction"):
    values = parts[name].values[earlier]
    print(f"{name:12} standard deviation {values.std():.2f}")

# %% [markdown]
# ## From one prompt to a measure
#
# Over a text, with intervals and a randomly initialised model beside it, these are the shares of `variance`; heads whose position
# peaks at one distance are the slash-dominant ones of `slash`.

# %%
cut = {"length": 128, "n_prompts": 4, "progress": False}
report = tl_posgen.analyze(model, bundled_text(), measures=["variance", "slash"], **cut)
report["slash"].plot("profiles")

# %%
print(*report["variance"].findings(), *report["slash"].findings(), sep="\n")

# %%
report.write("report-02")
