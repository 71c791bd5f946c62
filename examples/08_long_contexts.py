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
# # Long contexts: beyond the training length
#
# The mini model was trained on 512 tokens. You measure what happens beyond, keep it in its distribution with LM-Infinite, measure
# long prompts without a [query, key] matrix, and let the model write under hooks. A TransformerBridge throughout: a
# HookedTransformer ends at its training length.

# %%
import torch

import tl_posgen
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import LengthExtrapolation, lm_infinite

inside = 512
model = tl_posgen.load_model("mini", backend="bridge")  # or a name on huggingface.co, and its training length above
text = bundled_text()
model.cfg.n_ctx

# %% [markdown]
# ## What happens beyond the training length?
#
# Loss and outputs at twice the length: untouched, and with LM-Infinite (ten global tokens and a local window, distances
# frozen at the training length). The noise level is the distance between two halves of the prompts inside.

# %%
measure = LengthExtrapolation(inside=inside, times=2, conditions=("lm_infinite",))
found = measure(model, text, n_prompts=4, progress=False)
print(*found.findings(), sep="\n")

# %%
found.plot("loss")

# %%
found.plot("drift")

# %% [markdown]
# ## The same with hooks by hand, window by window
#
# Mean loss in the last quarter of twice the training length; the null for each is the text before it.

# %%
tokens = to_prompts(model, text, length=2 * inside, n_prompts=1)[0][None]
windows = {f"n_local {n}": lm_infinite(model, n_local=n) for n in (inside // 4, inside // 2, inside)}
for name, hooks in {"untouched": [], **windows}.items():
    losses = token_losses(model, tokens, hooks)[0]
    within, beyond = losses[: inside - 1].mean(), losses[-inside // 2 :].mean()
    print(f"{name:11} inside {within:.3f}, beyond {beyond:.3f} nats")

# %% [markdown]
# ## Long prompts without a matrix
#
# Prompts of more than 1,024 tokens are streamed where the model allows it: no scores are formed, every hook fires, the numbers are
# the same. `streaming` is a tool of its own, too.

# %%
with torch.no_grad(), tl_posgen.streaming(model):
    streamed = model(tokens)
with torch.no_grad():
    formed = model(tokens)
print("the same within 0.001:", torch.allclose(streamed, formed, rtol=0, atol=1e-3))

# %%
long = tl_posgen.analyze(
    model, text, measures=["variance", "slash"], length=2 * inside, n_prompts=1, streaming=True, progress=False
)
print(*long.findings(), sep="\n")

# %% [markdown]
# ## Let it write
#
# Greedy, after a prompt of three times the training length. Interventions that look at each query by itself work with the KV
# cache; captures, and interventions that need whole prompts, take `use_past_kv_cache=False`.

# %%
book = to_prompts(model, text, length=3 * inside + 60, n_prompts=1)[0]
prompt = book[None, : 3 * inside]
for name, hooks in {"untouched": [], "LM-Infinite": lm_infinite(model, n_local=inside // 2)}.items():
    with model.hooks(fwd_hooks=hooks):
        ids = model.generate(prompt, max_new_tokens=60, do_sample=False, stop_at_eos=False, verbose=False)
    written = ids[0, prompt.shape[1] :]
    print(f"{name}: {len(set(written.tolist()))} different tokens of {len(written)}")
    print(repr(model.tokenizer.decode(written)), "\n")

# %% [markdown]
# The text goes on with as many different tokens as:

# %%
follows = book[3 * inside :]
print(f"the book: {len(set(follows.tolist()))} of {len(follows)}")
print(repr(model.tokenizer.decode(follows)))

# %% [markdown]
# With and without the cache it writes the same:

# %%
with model.hooks(fwd_hooks=lm_infinite(model, n_local=inside // 2)):
    both = [
        model.generate(tokens[:, :inside], max_new_tokens=8, do_sample=False, verbose=False, use_past_kv_cache=cached)
        for cached in (True, False)
    ]
print(torch.equal(*both))

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({found.name: found}, found.provenance).write("report-08")
