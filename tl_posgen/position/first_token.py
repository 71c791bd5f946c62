"""Variants of a variable with and without the first token, named by one suffix."""

from collections.abc import Mapping

from tl_posgen.core.measure import Variable

WITHOUT_FIRST_TOKEN = "_without_first_token"
VARIANTS = ("", WITHOUT_FIRST_TOKEN)


def without_first_token(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables' declarations with the first token left out as query and as key.

    The suffix goes before `_text`, which stays last in the names of tokens' texts.
    """
    found = {}
    for name, one in variables.items():
        text = "_text" if name.endswith("_text") else ""
        label = f"{one.label}, first token out"
        new = f"{name.removesuffix(text)}{WITHOUT_FIRST_TOKEN}{text}"
        found[new] = Variable(label, one.unit, one.description, one.dims, interval=one.interval)
    return found
