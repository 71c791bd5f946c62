"""Finished results are those of exactly this model: `keep=` and `after=` see what sums of weights do not."""

import re
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from families import GROUPED, save_config, with_sizes
from written import write_measure

import tl_posgen
from tl_posgen.core.null_models import NullModels
from tl_posgen.core.store import Parts, code_of
from tl_posgen.errors import InputError, OutputError
from tl_posgen.loss import Loss
from tl_posgen.models.loading.load import load_model
from tl_posgen.position import Variance

TOKENS = torch.arange(5, 45).reshape(2, 20)
RUN = {"measures": "loss", "nulls": 0, "progress": False}


@pytest.fixture
def model(family_directory, backend):
    return load_model(family_directory("llama"), backend)


def loss_of(report) -> float:
    return report["loss"].numbers("loss").value


@contextmanager
def swapped_rows(model):
    """Two rows of the embedding, which the prompts hold, in each other's place: the same sum and norm."""
    weight = model.embed.W_E if hasattr(model.embed, "W_E") else model.embed.weight
    with torch.no_grad():
        weight[[7, 9]] = weight[[9, 7]]
    yield


@contextmanager
def other_frequencies(model):
    """RoPE's tables changed in place."""
    with torch.no_grad():
        for name, table in model.named_buffers():
            if re.search("inv_freq|rotary_sin", name):
                table.mul_(0.5)
    yield


@contextmanager
def torch_hook(model):
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output.roll(1, -1))
    yield
    handle.remove()


def add_adapter(model, is_on) -> None:
    """Put a function in the place of an MLP's forward that adds something of its own while `is_on()`."""
    mlp = getattr(model.blocks[1].mlp, "original_component", model.blocks[1].mlp)
    forward = mlp.forward
    mlp.forward = lambda x, *args, **options: forward(x, *args, **options) + (x.roll(1, -1) if is_on() else 0)


@contextmanager
def patched_forward(model):
    add_adapter(model, lambda: True)
    yield


CHANGES = [swapped_rows, other_frequencies, torch_hook, patched_forward]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_numbers_of_before_a_change_are_not_those_of_after_it(model, tmp_path, change):
    before = tl_posgen.analyze(model, TOKENS, keep=(first := Parts(tmp_path)), **RUN)
    with change(model):
        fresh = tl_posgen.analyze(model, TOKENS, **RUN)
        assert abs(loss_of(fresh) - loss_of(before)) > 1e-5
        kept = tl_posgen.analyze(model, TOKENS, keep=(second := Parts(tmp_path)), **RUN)
        assert loss_of(kept) == loss_of(fresh)
        with pytest.raises(InputError, match=r"after: loss was measured .*; leave it out to measure it anew"):
            tl_posgen.analyze(model, TOKENS, after=before, **RUN)
        assert loss_of(tl_posgen.analyze(model, TOKENS, after=fresh, **RUN)) == loss_of(fresh)
    assert len({*first.files, *second.files}) == 2


def test_an_adapter_that_is_switched_off_is_another_model(model, tmp_path):
    """As peft's disable_adapter() does it: a flag that the forward pass asks for, and no weight changes."""
    flags, losses = [], []
    add_adapter(model, lambda: flags[-1])
    for on in (True, False):
        flags.append(on)
        losses += [loss_of(tl_posgen.analyze(model, TOKENS, keep=tmp_path, **RUN))]
        assert losses[-1] == loss_of(tl_posgen.analyze(model, TOKENS, **RUN))
    assert losses[0] != losses[1]


def test_no_result_under_functions_is_taken_for_that_of_others(model):
    """Names are all that is known of hooks and metrics: one may do what another of its name does not."""

    def silent(z, hook):
        return 0 * z

    before, hooks = tl_posgen.analyze(model, TOKENS, **RUN), [("blocks.0.attn.hook_z", silent)]
    with model.hooks(fwd_hooks=[(lambda name: name.endswith("attn.hook_z"), silent)]):
        hooked = tl_posgen.analyze(model, TOKENS, **RUN)
        with pytest.raises(InputError, match="cannot know what the hooks on this model do"):
            tl_posgen.analyze(model, TOKENS, after=hooked, **RUN)
    [name] = hooked.provenance["added_hooks"]
    assert re.fullmatch(r"blocks\.\*\.attn\.hook_z: .*silent", name)
    with pytest.raises(InputError, match="another added_hooks"):
        tl_posgen.analyze(model, TOKENS, after=hooked, **RUN)
    for more, message in (
        ({"fwd_hooks": hooks}, "fwd_hooks do"),
        ({"metric": lambda x, _: x[:, 0, 0]}, "a metric does"),
    ):
        with pytest.raises(InputError, match=f"cannot know what {message}"):
            tl_posgen.analyze(model, TOKENS, after=before, **RUN, **more)


def test_a_report_under_functions_is_replaced_by_force_alone(model, tmp_path):
    metrics = [lambda logits, _: logits[:, 0, 0], lambda logits, _: 2 * logits[:, 0, 0]]
    one, other = (tl_posgen.analyze(model, TOKENS, metric=metric, **RUN) for metric in metrics)
    one.write(tmp_path / "out")
    with pytest.raises(OutputError, match="force=True"):
        other.write(tmp_path / "out")
    other.write(tmp_path / "out", force=True)


def test_options_that_were_left_out_and_the_seed_are_compared(model):
    settings = {**RUN, "measures": ["variance"]}
    few = tl_posgen.analyze(model, TOKENS, **{**RUN, "measures": [Variance(n_distances=4)]})
    with pytest.raises(InputError, match=r"'n_distances': 4.*and is asked for with.*'n_distances': None"):
        tl_posgen.analyze(model, TOKENS, after=few, **settings)
    with pytest.raises(InputError, match="another seed"):
        tl_posgen.analyze(model, TOKENS, after=few, seed=1, **{**RUN, "measures": [Variance(n_distances=4)]})


def test_what_cannot_read_the_few_tokens_is_not_kept(model, tmp_path):
    tl_posgen.check(model)
    mlp = getattr(model.blocks[1].mlp, "original_component", model.blocks[1].mlp)
    forward = mlp.forward
    mlp.forward = lambda x, *args, **options: forward(x) + torch.zeros(20, 1)  # for prompts of 20 tokens alone
    before = tl_posgen.analyze(model, TOKENS, **RUN)
    for more in ({"keep": tmp_path}, {"after": before}):
        with pytest.raises(InputError, match=r"leave it out|keep: this model cannot read a few tokens"):
            tl_posgen.analyze(model, TOKENS, **RUN, **more)


@pytest.mark.parametrize(("age", "n_kept"), [(3600, 1), (-3600, 0)])
def test_a_measure_in_a_file_is_kept_until_its_code_changes(model, tmp_path, age, n_kept):
    """One that was changed after this process began is not: other code may have been read than stands there."""
    (keep := tmp_path / "kept").mkdir()

    def size(factor) -> tuple[float, list]:
        measure = write_measure(tmp_path, factor, age=age).KeySize()
        parts = Parts(keep)
        found = tl_posgen.analyze(model, TOKENS, measures=[measure], keep=parts, nulls=0, progress=False)
        return float(found["key_size"].trained["size"].mean()), parts.files

    once, files = size(1)
    assert len(files) == len(list(keep.iterdir())) == n_kept
    assert size(1) == (once, files)
    twice, others = size(2)
    assert twice == pytest.approx(2 * once)
    assert len({*files, *others}) == 2 * n_kept


@dataclass(frozen=True)
class Mine(Loss):
    """The loss once more, under a name of its own."""


def test_a_measure_in_no_file_is_measured_anew(model, tmp_path, monkeypatch):
    assert code_of(Loss()) == ""
    assert len(str(code_of(Mine()))) == 16
    monkeypatch.setattr(Mine, "__module__", "of_a_notebook")
    found = tl_posgen.analyze(model, TOKENS, keep=tmp_path, **{**RUN, "measures": [Mine]})
    assert list(found) == ["mine"]
    assert not list(tmp_path.iterdir())


def test_what_other_code_of_this_package_kept_is_measured_anew(model, tmp_path, monkeypatch):
    """What is built in has the package's code in its key, as a version that is not released says little."""
    kept = Parts(tmp_path)
    tl_posgen.analyze(model, TOKENS, keep=kept, **RUN)
    monkeypatch.setattr("tl_posgen.core.store.PACKAGE", "other code")
    again = Parts(tmp_path)
    tl_posgen.analyze(model, TOKENS, keep=again, **RUN)
    assert not {*kept.files} & {*again.files}
    assert len(kept.files) == len(again.files)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "shuffled matrices"])
def test_a_null_that_changes_no_weight_is_refused(tmp_path, backend, kind, in_place):
    config = with_sizes("LlamaConfig", GROUPED, num_hidden_layers=1)()
    model = load_model(save_config(config, tmp_path), backend)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    nulls = NullModels(model, {kind: (0,)})
    with pytest.raises(InputError, match=rf"{kind}.* \(seed 0\) of .* has the model's own weights, so it is no null"):
        list(nulls.models(in_place=in_place))
