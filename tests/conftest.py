"""What all tests share: models and texts, loaded once a session, and a guard against tests that change them.

    def test_of_a_trained_model(mini, alice): ...            # HookedTransformer where there is one, else a bridge
    def test_of_a_bridge(mini_bridge): ...
    def test_against_a_reference(stories, tinystories): ...  # skipped where ../shared is missing

A test that needs a model of its own to change takes `copy.deepcopy(mini)` or calls `tl_posgen.load_model`.
"""

import gc
import os
from collections.abc import Callable, Generator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jaxtyping
import pytest
import torch
from hypothesis import settings

SHARED = Path(__file__).parents[2] / "shared"
LONG = 20_000  # characters of a text
settings.register_profile("repeatable", derandomize=True)  # a commit that was tested stays tested; `make soak` draws
settings.load_profile("repeatable")
_loaded: dict[str, tuple[Any, dict[str, Any]]] = {}  # fixture name -> the model, and what it was when last looked at


def pytest_addoption(parser: pytest.Parser) -> None:
    kinds = ("cuda", "two", "mps", "tf32", "gpu")
    parser.addoption("--device", choices=kinds, help="the accelerator of tests/devices; all but gpu are simulated")
    parser.addoption("--shapes-in", help="a,b: shapes are checked in these files and folders of tests, not in others")


def pytest_sessionstart() -> None:
    """Tiny tensors: a second thread costs more than it brings. Parameters drawn at random while tests are collected
    are the same in every process, as pytest-xdist demands."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `longer` is slow, except on TransformerLens 4, where CI runs no slow ones."""
    if version("transformer-lens").startswith("3."):
        for item in items:
            if item.get_closest_marker("longer"):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """The million objects of torch and transformers stay: garbage collection need not look at them every time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    places = item.config.getoption("--shapes-in")
    here = places is None or any(item.path.is_relative_to(item.config.rootpath / one) for one in places.split(","))
    jaxtyping.config.update("jaxtyping_disable", not here)
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session", autouse=True)
def _long_texts_are_tokenised_once():
    """A book takes a tenth of a second to tokenise, and hundreds of tests cut their prompts of it: its ids are kept
    while the tokenizer lives and is the same."""
    from tl_posgen.models import tokens

    made, text_ids = WeakKeyDictionary(), tokens.text_ids

    def text_ids_once(tokenizer: Any, text: str) -> list[int]:
        if len(text) < LONG:
            return text_ids(tokenizer, text)
        key = text, len(tokenizer), repr(getattr(tokenizer, "backend_tokenizer", None))
        known = made.setdefault(tokenizer, {})
        if key not in known:
            known[key] = text_ids(tokenizer, text)
        return [*known[key]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "text_ids", text_ids_once)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of reference models and texts beside the checkout."""
    if not (SHARED / "models").is_dir():
        pytest.skip("reference models are not here: no directory ../shared/models")
    return SHARED


@pytest.fixture(scope="session")
def mini() -> Any:
    """The bundled model, trained: 4 layers of 4 heads, RoPE; on the backend that `load_model` chooses."""
    return _load("mini", "mini")


@pytest.fixture(scope="session")
def mini_bridge() -> Any:
    """The bundled model as a TransformerBridge."""
    return _load("mini_bridge", "mini", backend="bridge")


@pytest.fixture(scope="session")
def stories(shared: Path) -> Any:
    """stories260K, trained on TinyStories: 5 layers of 8 heads with 4 key heads, RoPE."""
    return _load("stories", shared / "models" / "stories260K")


@pytest.fixture(scope="session")
def learned_positions(shared: Path) -> Any:
    """atome_vanilla_1m, trained: learned absolute positions, no RoPE."""
    return _load("learned_positions", shared / "models" / "atome_vanilla_1m")


@pytest.fixture(scope="session")
def alice() -> str:
    """The bundled text, which the bundled model was not trained on."""
    from tl_posgen.models.tokens import bundled_text

    return bundled_text()


@pytest.fixture(scope="session")
def tinystories(shared: Path) -> str:
    """Stories that `stories` was not trained on."""
    return (shared / "text" / "tinystories.txt").read_text(encoding="utf-8")


@cache
def why_no_hooked() -> str | None:
    """Why there is no HookedTransformer here, or None where there is."""
    from tl_posgen.errors import ModelError
    from tl_posgen.models.conversion.convert import hooked_parts

    try:
        hooked_parts()
    except ModelError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def family_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the directory of that tiny model with random weights; the names are those of tests/families.py."""
    from families import save_family

    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: save_family(name, root / name))


@pytest.fixture(scope="session")
def family_model(family_directory: Callable[[str], Path]) -> Callable[..., Any]:
    """(name, backend="auto") -> that tiny model, one object for the whole session: leave it as it is."""
    from families import FAMILIES

    import tl_posgen

    loaded = cache(lambda name, backend: tl_posgen.load_model(family_directory(name), backend=backend))

    def model(name: str, backend: str = "auto") -> Any:
        if backend == "hooked" and (why := why_no_hooked()):
            pytest.skip(why)
        if backend == "hooked" and not FAMILIES[name].hooked:
            pytest.skip(f"TransformerLens converts no {name}")
        return loaded(name, backend)

    return model


@pytest.fixture(scope="session")
def llama(family_model: Callable[..., Any]) -> Any:
    """A tiny Llama with random weights and grouped keys: 2 layers of 4 heads with 2 key heads."""
    return family_model("llama")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with random weights and the bundled model's tokenizer."""
    from families import save_small

    return save_small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def small_model(small: Path) -> Any:
    """That tiny model: 2 layers of 4 heads with 2 key heads, RoPE, biases of q and k."""
    return _load("small_model", small)


@pytest.fixture(scope="module")
def result(request: pytest.FixtureRequest) -> Any:
    """Of MEASURE, as the module has it, in the fixture `report`, or in that which it names as FROM."""
    return request.getfixturevalue(getattr(request.module, "FROM", "report"))[request.module.MEASURE]


@pytest.fixture(params=["hooked", "bridge"])
def backend(request: pytest.FixtureRequest) -> str:
    """Either backend, one after the other."""
    if request.param == "hooked" and (why := why_no_hooked()):
        pytest.skip(why)
    return request.param


@pytest.fixture(scope="session")
def has_hooked() -> bool:
    """Whether there is a HookedTransformer here."""
    return why_no_hooked() is None


@pytest.fixture
def needs_hooked() -> None:
    """Skips the test where there is no HookedTransformer."""
    if why := why_no_hooked():
        pytest.skip(why)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command tl-posgen with these words: its exit code, and what it printed on stdout and stderr."""
    from tl_posgen.cli import main

    def called(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tl-posgen", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        printed, error = capsys.readouterr()
        return int(stop.value.code or 0), printed, error

    return called


@pytest.fixture
def unchecked():
    """What users get: the types of arguments are not checked, as they are in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture(autouse=True)
def _shared_models_stay_as_they_are(request: pytest.FixtureRequest):
    """Fails the test that leaves a shared model with other weights, other hooks or another configuration."""
    yield
    for name in _loaded.keys() & set(request.fixturenames):
        model, before = _loaded[name]
        now = _state_of(model)
        if changed := [key for key in now | before if now.get(key) != before.get(key)]:
            _loaded[name] = model, now  # the next test is not blamed
            pytest.fail(f"this test changed the shared model {name!r}: {', '.join(changed[:3])}; change a deepcopy")


def _load(fixture: str, name: Any, **options: Any) -> Any:
    import tl_posgen

    model = tl_posgen.load_model(name, **options)
    _loaded[fixture] = model, _state_of(model)
    return model


def _state_of(model: Any) -> dict[str, Any]:
    """Everything that a test could leave behind in a model, cheap to compare: 2 ms for a million weights."""
    state: dict[str, Any] = {
        name: (
            weight.data_ptr(),
            weight._version,
            weight.requires_grad,
            str(weight.detach().sum(dtype=torch.float64).item()),
        )
        for name, weight in (*model.named_parameters(), *model.named_buffers())
    }
    state |= {f"hooks of {name}": n for name, hook in model.hook_dict.items() if (n := len(hook.fwd_hooks))}
    state |= {f"cfg.{name}": repr(value) for name, value in vars(model.cfg).items()}
    return state | {"training": model.training}


@pytest.fixture
def passes(monkeypatch):
    """Numbers of prompts of the forward passes that are made, in a list that grows."""
    made: list[int] = []
    for module in ("models.capture.capturing", "models.backends.backend", "models.loss", "coupling.jacobians"):
        monkeypatch.setattr(f"tl_posgen.{module}.count_pass", made.append)
    return made
