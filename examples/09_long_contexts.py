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
# The mini model was trained on 512 tokens. This notebook measures what happens beyond them, with and without LM-Infinite;
# measures long prompts without forming score matrices; and lets the model write under hooks. The model is a TransformerBridge,
# because a HookedTransformer takes no more than its training length.

# %%
import torch

import tl_posgen
from tl_posgen.hooks import lm_infinite
from tl_posgen.models import bundled_text, to_prompts
from tl_posgen.models.loss import token_losses
from tl_posgen.position import LengthExtrapolation

inside = 512
model = tl_posgen.load_model("mini", backend="bridge")  # or a name on huggingface.co, and its training length above
text = bundled_text()
model.cfg.n_ctx

# %% [markdown]
# ## What happens beyond the training length?
#
# Loss and heads' outputs up to twice the training length, untouched and with LM-Infinite: ten global tokens and a local window,
# and no distance above the training length. The noise level is the Fréchet distance between the outputs of two halves of the
# prompts inside the training length.

# %%
measure = LengthExtrapolation(inside=inside, times=2, conditions=("lm_infinite",))
result = measure(model, text, n_prompts=4, progress=False)
print(*result.findings(), sep="\n")

# %%
result.plot("loss")

# %%
result.plot("drift")

# %% [markdown]
# ## The same with hooks by hand, window by window
#
# `beyond` is the mean loss in the last quarter of the prompt. Compare it with `inside`, the loss up to the training length.

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
# Prompts of more than 1,024 tokens are streamed: no score matrix is formed, hooks fire as usual, and numbers are the same.
# `streaming` does this for your own passes too.

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
# The model continues a prompt of three times the training length, always with the likeliest token. Interventions that treat each
# query by itself work with the KV cache; the others need `use_past_kv_cache=False`.

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
# For comparison, the number of different tokens in the book's own continuation:

# %%
follows = book[3 * inside :]
print(f"the book: {len(set(follows.tolist()))} of {len(follows)}")
print(repr(model.tokenizer.decode(follows)))

# %% [markdown]
# With and without the cache the model writes the same:

# %%
with model.hooks(fwd_hooks=lm_infinite(model, n_local=inside // 2)):
    texts = [
        model.generate(tokens[:, :inside], max_new_tokens=8, do_sample=False, verbose=False, use_past_kv_cache=cached)
        for cached in (True, False)
    ]
print(torch.equal(*texts))

# %% [markdown]
# ## Keep it

# %%
from tl_posgen import Report

Report({result.name: result}, result.provenance).write("report-09")
