"""The harness' LM over models of both backends, and the plain models that it is compared with."""

from functools import cache

import pytest
from plain_answers import plain_model
from transformers import AutoTokenizer

from tl_posgen import load_model
from tl_posgen.errors import ModelError
from tl_posgen.evaluation import LensLM
from tl_posgen.models.conversion.source import MINI


@pytest.fixture(scope="session")
def ask():
    """Requests as the harness makes them: ask(kind, arguments of the first, arguments of the second, ...)."""
    instance = pytest.importorskip("lm_eval.api.instance", reason="lm-evaluation-harness is missing: extra eval")
    return lambda kind, *pairs: [instance.Instance(kind, {}, pair, number) for number, pair in enumerate(pairs)]


@pytest.fixture(scope="session")
def directory(request):
    return lambda name: MINI if name == "mini" else request.getfixturevalue("shared") / "models" / name


@pytest.fixture(scope="session")
def load(directory):
    """(name, backend) -> a model of TransformerLens."""
    made = cache(lambda name, backend: load_model(directory(name), backend=backend))

    def model(name, backend="bridge"):
        try:
            return made(name, backend)
        except ModelError as error:
            if backend == "hooked" and "HookedTransformer" in str(error):
                pytest.skip(str(error))
            raise

    return model


@pytest.fixture(scope="session")
def lens(load):
    """`LensLM` of the bundled model as a bridge, or of another model, without progress bars."""
    return lambda *hooks, model=None, **options: LensLM(model or load("mini"), *hooks, progress=False, **options)


@pytest.fixture(scope="session")
def plain(directory):
    """name -> model and tokenizer of transformers, of which TransformerLens knows nothing."""
    return cache(lambda name: (plain_model(directory(name)), AutoTokenizer.from_pretrained(directory(name))))


@pytest.fixture(scope="session")
def hflm(plain):
    def made(name, **options):
        huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-evaluation-harness is missing")
        model, tokenizer = plain(name)
        return huggingface.HFLM(model, tokenizer=tokenizer, **{"device": "cpu", "batch_size": 3, **options})

    return made
