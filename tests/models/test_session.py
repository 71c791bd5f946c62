"""A model has one session: what was found out lives as long as the user's object, and two classes know its kind."""

import ast
import copy
import gc
import pickle
import weakref
from importlib import resources
from pathlib import Path

import pytest
import torch
from families import VOCAB
from transformers import AutoModelForCausalLM, AutoTokenizer

from tl_posgen import analyze, analyze_cache, attach, check, streaming
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.hooks import by_constant, substitute
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loading.load import load_model, open_session, without_context_limit
from tl_posgen.models.loading.snapshot import snapshot
from tl_posgen.models.loss import run_prompts
from tl_posgen.models.session import MEMORY, Choices, session_of

TOKENS = torch.randint(2, VOCAB, (2, 12), generator=torch.Generator().manual_seed(6))


def test_it_holds_the_users_object_and_what_is_known_of_it(llama, backend, family_directory):
    session = session_of(llama)
    assert session.model is llama
    assert session.backend.name == session.origin.backend == backend
    assert session.origin.directory == family_directory("llama")
    assert session.origin.seed is session.origin.revision is None
    assert [layer.encoding for layer in geometry_of(llama)] == ["rotary", "rotary"]
    assert session.limit.tokens == (128 if backend == "hooked" else None)


def test_what_is_found_out_is_found_out_once(model, backend):
    passes = []
    model.embed.register_forward_hook(lambda *_: passes.append(1))
    first = session_of(model).layers()
    assert session_of(model).layers() is first
    geometry_of(model)
    assert len(passes) == 1
    assert session_of(model).layers(again=True) is not first
    assert len(passes) == (3 if backend == "bridge" else 2)  # a bridge is also held against the plain model


def test_hooks_at_work_are_those_of_transformer_lens_and_go_afterwards(llama):
    session, seen = session_of(llama), []
    hooks = [
        ("blocks.1.attn.hook_z", lambda z, hook: 0 * z),
        (lambda name: name.endswith("hook_resid_pre"), lambda x, hook: seen.append(hook.name)),
    ]
    users = [("blocks.0.hook_resid_pre", lambda x, hook: 2 * x)]
    with llama.hooks(fwd_hooks=users):
        with llama.hooks(fwd_hooks=hooks):
            expected = llama(TOKENS)
        names, before = sorted(seen), [len(point._forward_hooks) for point in llama.hook_dict.values()]
        seen.clear()
        with session.under(hooks):
            assert torch.equal(llama(TOKENS), expected)
        assert sorted(seen) == names
        assert len(names) == 2
        assert [len(point._forward_hooks) for point in llama.hook_dict.values()] == before
    assert llama.context_level == 0


def test_a_pass_without_logits_runs_no_head(llama):
    ran = []
    llama.unembed.register_forward_hook(lambda *_: ran.append(1))
    session_of(llama).layers()
    ran.clear()
    assert run_capture(llama, TOKENS, lambda capture: None) is None
    assert not ran
    assert run_capture(llama, TOKENS, lambda capture: None, {"logits"}) is not None
    assert ran
    assert torch.isfinite(llama(TOKENS)).all()


def test_another_dtype_is_proved_anew(model):
    single = session_of(model).layers()
    model.to(torch.float64)
    double = session_of(model).layers()
    assert double is not single
    assert double[0].geometry.error != single[0].geometry.error
    assert session_of(model).layers() is double


def test_a_model_is_let_go_with_everything_known_of_it(family_directory, backend):
    model = load_model(family_directory("qwen3"), backend)
    run_capture(model, TOKENS, lambda capture: None, {"inputs"})
    norm = weakref.ref(model.blocks[0].attn.q_norm)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert norm() is None


def test_layers_that_are_not_asked_for_may_be_unsupported(model):
    model.add_hook("blocks.1.attn.hook_attn_scores", lambda scores, hook: scores * 1.5)
    try:
        assert [layer.layer for layer in geometry_of(model, layers=[0])] == [0]
        with pytest.raises(UnsupportedModelError, match="layer 1"):
            geometry_of(model)
    finally:
        model.reset_hooks()


@pytest.mark.parametrize(
    ("name", "kind", "remedy"),
    [("llama", "hooked", 'backend="bridge"'), ("gpt2", "hooked", "shorter"), ("gpt2", "bridge", "shorter")],
)
def test_a_prompt_that_is_too_long_comes_with_the_remedy(family_model, name, kind, remedy):
    model = family_model(name, kind)
    session_of(model).require_length(128)
    with pytest.raises(InputError, match=rf"prompts of 129 tokens are too long: this model takes 128, .*; .*{remedy}"):
        session_of(model).require_length(129)


def test_a_context_limit_is_lifted_by_the_other_kind_of_object(family_model, family_directory, backend):
    model = family_model("llama", backend)
    lifted, long = without_context_limit(model), TOKENS.repeat(1, 12)
    assert (lifted is model) == (backend == "bridge")
    assert session_of(lifted).limit.tokens is None
    of_lifted, of_model = (run_prompts(of, TOKENS, lambda logits, _: logits) for of in (lifted, model))
    torch.testing.assert_close(of_lifted, of_model, atol=1e-4, rtol=1e-4)
    assert all(run_prompts(lifted, long, lambda logits, _: bool(logits.isfinite().all())))
    learned = family_model("gpt2", backend)
    assert without_context_limit(learned) is learned


def test_edited_weights_are_not_exchanged_for_those_that_were_loaded(family_model):
    model = copy.deepcopy(family_model("llama", "hooked"))
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0] *= 3
    with pytest.raises(ModelError, match="has other weights by now; hand over a bridge of your own"):
        without_context_limit(model)


def test_leading_tokens_are_not_taken_for_padding(family_directory, backend):
    model, plain = (load_model(family_directory("llama"), backend) for _ in range(2))
    model.tokenizer.pad_token, model.tokenizer.padding_side = "</s>", "left"
    tokens = torch.cat([torch.ones(2, 3, dtype=torch.long), TOKENS], dim=1)
    [of_model] = run_prompts(model, tokens, lambda logits, _: logits)
    with torch.no_grad():
        torch.testing.assert_close(of_model, plain(tokens, return_type="logits"))


@pytest.mark.parametrize("wrong", [None, 3, b"mini", ["mini"], torch.nn.Linear(2, 2)])
def test_something_else_than_a_model_is_refused(unchecked, wrong):
    for door in (open_session, session_of):
        with pytest.raises(
            InputError, match=f"{type(wrong).__name__} is not a model of TransformerLens; give a Hooked"
        ):
            door(wrong)


def test_a_model_of_transformers_is_named_its_copy(unchecked, family_directory):
    place = family_directory("llama")
    yours, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    for door in (open_session, session_of, load_model):
        with pytest.raises(InputError, match=r"tl_posgen\.training\.snapshot\(model, tokenizer\)$"):
            door(yours)
    assert session_of(snapshot(yours, tokenizer)).label == f"{place.name}, weights in memory"


KNOW_THE_BRIDGE = {"bridge.py", "fused_bridge.py"}
READ_THE_USERS_CHOICE = {"models/conversion/convert.py", "models/loading/load.py"}
ONLY_A_BRIDGE_HAS = {"original_model", "original_component", "rotary_emb"}


@pytest.mark.slow
def test_no_other_module_asks_which_kind_of_model_it_is():
    package = Path(str(resources.files("tl_posgen")))
    for path in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        words = {node.value for node in nodes if isinstance(node, ast.Constant)}
        if path.name not in KNOW_THE_BRIDGE:
            assert not ONLY_A_BRIDGE_HAS & (names | words), path
        sides = [side for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)]
        compared = {side.value for side in sides if isinstance(side, ast.Constant)}
        if str(path.relative_to(package)) not in READ_THE_USERS_CHOICE:
            assert not {"hooked", "bridge"} & compared, path
        if path.name != "session.py":
            assert not {"HookedTransformer", "TransformerBridge"} & words, path


WAYS_IN = {
    "analyze": lambda model, cache: analyze(model, TOKENS, measures="three_axis", progress=False),
    "attach": lambda model, cache: attach(model, "three_axis").__enter__(),
    "analyze_cache": lambda model, cache: analyze_cache(model, cache, tokens=TOKENS, measures="three_axis"),
    "check": lambda model, cache: check(model),
    "streaming": lambda model, cache: streaming(model).__enter__(),
    "substitute": lambda model, cache: substitute(model, by_constant),
}


@pytest.mark.parametrize("part", ["whole", "half", "half of what is known"])
@pytest.mark.parametrize("way", WAYS_IN)
def test_weights_on_the_device_meta_are_refused_every_way_in(model, way, part):
    """All of a model, or some of it as accelerate leaves it: of one that is known, or met for the first time."""
    session_of(model).layers()
    _, cache = model.run_with_cache(TOKENS)
    if part == "half":
        vars(model).pop(MEMORY)
    (model if part == "whole" else model.blocks[1]).to("meta")
    with pytest.raises(InputError, match=r"^\S+ is on the device meta, which holds no numbers.*device='cpu'\)$"):
        WAYS_IN[way](model, cache)


def test_a_copy_begins_with_the_origin_alone(model):
    """Deep or pickled: what was found out, and chosen, is of the first object; its lock cannot be copied."""
    session_of(model).layers()
    with session_of(model).choosing(Choices(streaming=True)):
        copied = session_of(copy.deepcopy(model))
        pickled = pickle.loads(pickle.dumps(vars(model)[MEMORY]))
    assert copied.origin == pickled.origin == session_of(model).origin
    assert copied.choices == pickled.choices == session_of(model).choices == Choices()
    assert not copied._memory.layers
    assert not pickled.layers
